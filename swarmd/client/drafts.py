"""Which draft proposes tokens for a model: one that is named, else one that learned here, else one of the catalog."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from swarmd.client.drafting.block_draft import BlockDraft, BlockModel
from swarmd.client.drafting.draft_block import load_block
from swarmd.client.drafting.source import DraftSource
from swarmd.client.drafting.whole_model import Draft, DraftModel
from swarmd.client.swarm import AsyncSwarm
from swarmd.client.text.tokenizer import load_tokenizer
from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.models import draft as drafts
from swarmd.protocol.models.draft import DraftSettings
from swarmd.values import ModelId

logger = logging.getLogger(__name__)

AUTO = "auto"
MOST_FETCHED_BYTES = 256 * 2**20  # of a draft that nobody asked for: what is larger has to be named once


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft on this disk: the file of a block with its ``settings``, or the folder of a whole model.

    ``written_at`` tells a file from the one that it replaces.
    """

    path: Path
    settings: DraftSettings | None = None
    written_at: int = 0  # ns


async def find_draft(swarm: AsyncSwarm, name: str, base: ModelId) -> FoundDraft | None:
    """Find the draft called so, or by "auto" the one that there is, and fetch it. Raises SwarmError."""
    if name != AUTO:
        return await _fetch(swarm, _require_draft(swarm, name, base), base)
    own = swarm.drafts_folder / base
    if drafts.is_draft(own):
        return _find_own(own, base)
    for listed_name, (hash_, for_model) in sorted(swarm.view().catalog.drafts.items()):
        if for_model == base:
            manifest = await swarm.supply.manifest(ModelId(hash_))
            n_bytes = sum(entry.n_bytes for entry in manifest.entries)
            held = swarm.supply.library.folders.get(ModelId(hash_))
            if n_bytes <= MOST_FETCHED_BYTES or (held is not None and held.is_whole):
                return await _fetch(swarm, ModelId(hash_), base)
            logger.info("the draft %s has %d B: it is fetched once it is named (--draft)", listed_name, n_bytes)
    return None


def _find_own(folder: Path, base: ModelId) -> FoundDraft | None:
    """The draft that learned here, once it was judged. Raises ConfigError."""
    file = drafts.read_file(folder)
    if file.base != base:
        raise ConfigError(f"the draft in {folder} learned from {file.base[:12]}, not from {base[:12]}: move it away")
    path = folder / drafts.WEIGHTS_FILE
    if not file.draft.acceptance:  # it learns still, or was interrupted
        return None
    try:
        return FoundDraft(path, file.draft, path.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: swarmd draft train makes it anew") from None


def _require_draft(swarm: AsyncSwarm, name: str, base: ModelId) -> ModelId:
    catalog = swarm.view().catalog
    hash_, for_model = catalog.drafts.get(name, ("", base))
    if for_model != base:
        raise ConfigError(f"the draft {name!r} is made for {for_model[:12]}, not for {base[:12]}")
    return ModelId(hash_) if hash_ else catalog.hash_of(name)


async def _fetch(swarm: AsyncSwarm, draft: ModelId, base: ModelId) -> FoundDraft:
    folder = await swarm.supply.ensure(draft)
    if drafts.is_draft_manifest(folder.manifest):
        try:
            return FoundDraft(folder.shards()[0], drafts.settings_of(folder.manifest, base))
        except IntegrityError as error:
            raise ConfigError(f"the draft {draft[:12]} cannot be used: {error}") from None
    return FoundDraft(folder.folder)


def load_draft(
    found: FoundDraft, folder: Path, embed: nn.Module, hidden: int, dtype: torch.dtype
) -> Callable[[], DraftSource]:
    """Load a draft for the model in a folder; returns what makes a source of a text. Raises ConfigError.

    ``embed`` are the model's input embeddings, ``hidden`` is how wide its hidden states are. A whole model is loaded in
    ``dtype``.
    """
    settings = found.settings
    n_tokens = embed.num_embeddings
    assert isinstance(n_tokens, int)
    if settings is None:
        if load_tokenizer(found.path).get_vocab() != load_tokenizer(folder).get_vocab():
            raise ConfigError(f"{found.path} cannot be a draft: it was made with another tokenizer than the model")
        return partial(Draft, DraftModel(found.path, dtype, n_tokens))
    embedding = embed(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
    if (settings.hidden, settings.embedding) != (hidden, embedding):
        raise ConfigError(
            f"the draft takes in hidden states of {settings.hidden} elements and embeddings of {settings.embedding}, "
            f"the model has {hidden} and {embedding}"
        )
    block = load_block(settings, found.path, n_tokens, torch.float32)
    return partial(BlockDraft, BlockModel(block, embed))
