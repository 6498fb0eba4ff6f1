"""Small vocabularies of the kinds that real models have beside byte-level ones."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers


def spm() -> Tokenizer:
    """As Llama 2 and Gemma write: bytes where there is no token for a character."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁red", "re", "d", '"', "日"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(["<s>", "</s>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def unigram() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁red", *'abcdefghijklmnopqrstuvwxyz{}[]":, ']
    made = Tokenizer(models.Unigram([(piece, -float(number)) for number, piece in enumerate(pieces)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "red": 1, "##s": 2}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made
