"""Plain local transformers, in a process that never imports swarmd: python local_reference.py FOLDER < cases.json."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    results = []
    for case in json.load(sys.stdin):
        torch.manual_seed(case["seed"])
        ids, mask = torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"])
        out = model.generate(input_ids=ids, attention_mask=mask, **case["options"])
        results.append(out.tolist())
    assert not any(name.startswith("swarmd") for name in sys.modules)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
