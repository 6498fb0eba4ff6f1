"""lm-eval over the gateway, and over transformers itself: ``python -m tools.lm_eval [--folder FOLDER]``.

A task like hellaswag, made offline of Python's own documentation: the beginning of a sentence, its end, and the ends of
three others. Both have to give the same accuracies. lm-eval is installed into the folder, and stays there if it is
named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from pydoc_data.topics import topics

from tests.real.gateways import smol_gateway
from tests.real.smollm2 import smollm2

PACKAGES = ("lm-eval[api]==0.4.13",)
N_QUESTIONS = 60
N_CHOICES = 4
SENTENCE = re.compile(r"[A-Z][^.:*`|_\n<>]{80,240}\.")
TASK = """task: ends_of_sentences
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{ends}}"
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


def make_task(folder: Path) -> None:
    """Write the task and its questions."""
    text = " ".join(" ".join(topic.split("\n")) for _, topic in sorted(topics.items()))
    found = sorted(set(SENTENCE.findall(" ".join(text.split()))))
    draw = random.Random(0)
    words = [sentence.split(" ") for sentence in draw.sample(found, N_QUESTIONS)]
    halves = [(" ".join(each[: len(each) // 2]), " ".join(each[len(each) // 2 :])) for each in words]
    questions = []
    for begin, end in halves:
        others = draw.sample([other for _, other in halves if other != end], N_CHOICES - 1)
        label = draw.randrange(N_CHOICES)
        questions.append({"begin": begin, "ends": [*others[:label], end, *others[label:]], "label": label})
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "ends_of_sentences.yaml").write_text(TASK.replace("DATA", str(data)))


def install(folder: Path) -> Path:
    """Install lm-eval, with this environment's torch and transformers; returns its interpreter."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def evaluate(python: Path, folder: Path, model: str, arguments: str) -> dict[str, float]:
    """Run lm-eval; returns its accuracies."""
    results = Path(tempfile.mkdtemp(dir=folder))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment |= {"PYTHONPATH": sysconfig.get_path("purelib"), "TQDM_DISABLE": "1", "LMEVAL_LOG_LEVEL": "WARNING"}
    command = [str(python), "-m", "lm_eval", "--model", model, "--model_args", arguments]
    command += ["--tasks", "ends_of_sentences", "--include_path", str(folder), "--output_path", str(results)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    (written,) = results.rglob("results_*.json")
    scores = json.loads(written.read_text())["results"]["ends_of_sentences"]
    return {name: scores[f"{name},none"] for name in ("acc", "acc_norm")}


def main() -> int:
    """Compare the two; returns 1 where they differ in the third digit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where lm-eval is, or is installed")
    named = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        folder = named or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        python = install(folder)
        make_task(folder)
        with smol_gateway(Path(temporary) / "swarm") as (_, _, gateway):
            asked = f"model=smol,base_url={gateway.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
            here = evaluate(python, folder, "local-completions", asked)
        there = evaluate(python, folder, "hf", f"pretrained={smollm2()},dtype=float32")
    print(f"through the gateway  {here}\ntransformers         {there}")
    return int(any(abs(here[name] - there[name]) >= 1e-3 for name in here))


if __name__ == "__main__":
    sys.exit(main())
