"""Plain local transformers, in a process that never imports swarmd: python local_reference.py < lines > lines.

A line in is [folder, cases] as JSON, a line out is what each case generates.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, cases = json.loads(line)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        results = []
        for case in cases:
            torch.manual_seed(case["seed"])
            ids, mask = torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"])
            out = model.generate(input_ids=ids, attention_mask=mask, **case["options"])
            results.append(out.tolist())
        assert not any(name.startswith("swarmd") for name in sys.modules)
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
