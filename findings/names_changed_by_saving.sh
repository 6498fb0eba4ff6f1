#!/usr/bin/env bash
# transformers 5.23.0: a Qianfan-OCR checkpoint that is loaded and saved again has other names of tensors.
#
# Guess: save_pretrained writes the names that from_pretrained has read, as it undoes its own renaming.
# Seen (2026-11-28, CPU, random weights): the blocks of the text part are read from language_model.model.layers.N, and
# written as language_model.model.encoder.layers.N. What is undone, "encoder." before "layers.", was meant for the blocks
# of the vision part only. transformers reads both; a program that knows the names that were there finds no block.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration

small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
text = {**small, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32}
vision = {**small, "image_size": [28, 28], "patch_size": [14, 14]}
folder = Path(sys.argv[1]) / "model"
file = folder / "model.safetensors"
QianfanOCRForConditionalGeneration(QianfanOCRConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
read = {name.replace("language_model.model.encoder.", "language_model.model."): t for name, t in load_file(file).items()}
save_file(read, file, metadata={"format": "pt"})
model, info = QianfanOCRForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], "that has changed: not all names are read"
model.save_pretrained(folder)
written = load_file(file)
changed = sorted(written.keys() - read.keys())
print(f"{len(changed)} of {len(read)} names are others after loading and saving, such as {changed[0]}")
assert changed and all(name.startswith("language_model.model.encoder.layers.0.") for name in changed), "that has changed"
PYTHON
