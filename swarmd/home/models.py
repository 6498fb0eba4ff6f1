"""Models that lie in folders of the user's, and the one that ships with swarmd."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from swarmd.home.paths import Home
from swarmd.protocol.models import manifest
from swarmd.protocol.untrusted import read_json
from swarmd.values import ModelId

BUNDLED_NAME = "demo"


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Checkpoint folders of the user's, as ``models.json`` lists them."""

    home: Home

    def read(self) -> dict[ModelId, Path]:
        """Read the folders by model hash; the bundled model is always there."""
        path = self.home.folder / "models.json"
        listed: dict[ModelId, str] = {}
        if path.is_file():
            listed = read_json(path, dict[ModelId, str], "remove it, and add the models again")
        bundled, _ = bundled_model()
        folders = {bundled: bundled_folder()}
        for model, folder in listed.items():
            folders[model] = Path(folder)
        return folders

    def add(self, model: ModelId, folder: Path) -> None:
        """Use a model from a folder of the user's, where it is."""
        self._write({**self.read(), model: folder.resolve()})

    def forget(self, model: ModelId) -> None:
        """No longer use a folder of the user's; it stays as it is."""
        folders = self.read()
        folders.pop(model, None)
        self._write(folders)

    def _write(self, folders: dict[ModelId, Path]) -> None:
        bundled = bundled_folder()
        listed = {model: str(folder) for model, folder in folders.items() if folder != bundled}
        self.home.write("models.json", json.dumps(listed, indent=2))


def bundled_folder() -> Path:
    """Where the model lies that ships with swarmd."""
    return Path(str(resources.files("swarmd") / "bundled"))


@functools.cache
def bundled_model() -> tuple[ModelId, int]:
    """Hash and number of blocks of the model that ships with swarmd."""
    bundled = manifest.read_folder(bundled_folder())
    return manifest.model_id(bundled), bundled.n_blocks
