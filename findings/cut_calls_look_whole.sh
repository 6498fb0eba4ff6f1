#!/usr/bin/env bash
# transformers 5.23.0: a call of a tool in tags that was cut off in mid-argument is parsed as a whole call without it.
#
# Guess: parse_response raises for a call that the model could not finish (max_new_tokens), as it does for calls in JSON.
# Seen (2026-11-27): of calls in the form of Qwen 3.5 (content "xml-inline") the arguments that were complete come back
# under the tool's name, as if the model had asked for just that. Nothing in the message says that it was cut: a program
# that acts on it deletes, writes or sends with half of the arguments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.23.0 jinja2==3.1.6
"$folder/venv/bin/python" - 2> /dev/null <<'PYTHON'
from transformers.utils.chat_parsing import parse_response

call = {"open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>", "close_pattern": r"</function>\s*</tool_call>"}
call |= {"repeats": True, "content": "xml-inline"}
call["content_args"] = {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"}
call["transform"] = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
fields = {"tool_calls": call, "content": {"content": "text"}}
template = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}
whole = (
    "<tool_call>\n<function=delete>\n<parameter=folder>\n/home/me\n</parameter>\n"
    "<parameter=only_older_than>\n30 days\n</parameter>\n</function>\n</tool_call>"
)
answers = {name: parse_response(text, template, prefix="") for name, text in {"whole": whole, "cut": whole[:100]}.items()}
for name, answer in answers.items():
    print(f"{name}: {answer['tool_calls'][0]['function']}")
assert answers["cut"]["tool_calls"][0]["function"] == {"name": "delete", "arguments": {"folder": "/home/me"}}, "that has changed"
PYTHON
