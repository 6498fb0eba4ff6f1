"""What stands between the marks of a call, in the ways in which families write it: names and arguments come out of it.

Each reader takes a body whole or raises ValueError; no body is taken by two of them. What models often get wrong and
what has one meaning only is read all the same: a line break in a string, a comma after the last, single quotes.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Iterator
from typing import Any

Call = tuple[Any, dict[str, Any]]
"""What stands for a name, and arguments, those of some writings as text whatever they are."""

# Where          who                                      body
# _read_json     Hermes, Qwen 2 and 3, Llama 3, Granite,  {"name": "f", "arguments": {"n": 1}}, or a list of such
#                Mistral, Phi-4, Command R, SmolLM3
# _read_named    Mistral since v11, DeepSeek V3, Kimi K2, f[ARGS]{"n": 1}   function<sep>f ```json {"n": 1} ```
#                gpt-oss                                  functions.f:0<sep>{"n": 1}
# _read_tags     Qwen3-Coder and 3.5, Seed, MiniMax M2,   <function=f><parameter=n>1</parameter></function>
#                DeepSeek V3.2, Kimi K3                   <invoke name="f"><parameter name="n">1</parameter></invoke>
# _read_pairs    GLM 4.5 to 4.7                           f <arg_key>n</arg_key><arg_value>1</arg_value>
# _read_braces   Gemma 4, FunctionGemma                   call:f{n:1,text:<|"|>a<|"|>}
# _read_python   Llama 4, LFM2, Olmo 3                    [f(n=1, text="a")]
NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters", "args")
ITEM_MARKS = re.compile(r"<｜tool▁call▁(?:begin|end)｜>|<\|tool_call_(?:begin|end)\|>")
NAMED = re.compile(
    r"(?:function<｜tool▁sep｜>|functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
    r"(?:(?:\[CALL_ID\]\w+)?\[ARGS\]|<｜tool▁sep｜>|```(?:json)?|<\|tool_call_argument_begin\|>"
    r"|(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>)?\s*"
    r"(?P<arguments>\{.*\})\s*(?:```)?",
    re.DOTALL,
)
TAGS = (
    (
        re.compile(r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>", re.DOTALL),
        re.compile(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL),
    ),
    (
        re.compile(r'<(?P<ns>(?:｜DSML｜)?)invoke name="(?P<name>[^"\n]+)">(?P<body>.*?)</(?P=ns)invoke>', re.DOTALL),
        re.compile(
            r'<(?P<ns>(?:｜DSML｜)?)parameter name="(?P<key>[^"\n]+)"(?: string="(?P<kind>\w+)")?>(?P<value>.*?)'
            r"</(?P=ns)parameter>",
            re.DOTALL,
        ),
    ),
    (
        re.compile(
            r'<\|open\|>call tool="(?P<name>[^"\n]+)"[^<]*<\|sep\|>(?P<body>.*?)<\|close\|>call<\|sep\|>', re.DOTALL
        ),
        re.compile(
            r'<\|open\|>argument key="(?P<key>[^"\n]+)" type="(?P<kind>\w+)"<\|sep\|>(?P<value>.*?)'
            r"<\|close\|>argument<\|sep\|>",
            re.DOTALL,
        ),
    ),
)
IS_TEXT = ("string", "true")  # what tags say of a value that is text whatever it looks like
PAIR = re.compile(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)
PAIRS_NAME = re.compile(r"\s*(?P<name>[\w.-]+)\s*")
BRACES = re.compile(r"\s*call:(?P<name>[\w.-]+)(?P<arguments>\{.*\})\s*", re.DOTALL)
QUOTES = re.compile(r'<\|"\|>|<escape>')
BARE_KEY = re.compile(r"(?<=[{,])(\s*)([\w.$-]+)(\s*):")
CONSTANTS = {"true": True, "false": False, "null": None}
UNREADABLE = (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError)
"""What Python's own readers raise for a text that is none: its parser has too deep ones end for want of memory."""


def read_calls(body: str, is_closed: bool) -> list[Call]:
    """Read the calls that stand between two marks; ``is_closed``: whether the second was written. Raises ValueError."""
    readers = [_read_json, _read_named, _read_tags, _read_braces, _read_python]
    if is_closed:  # one that was cut off behind an argument looks whole
        readers.append(_read_pairs)
    for read in readers:
        try:
            calls = read(body.strip())
        except UNREADABLE:
            continue
        if calls:
            return calls
    raise ValueError("a call that was not written as any model should")


def read_value(text: str) -> Any:
    """Read JSON, or what is nearly that. Raises one of UNREADABLE."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return _python_value(ast.parse(text.strip(), mode="eval").body)


def _read_json(body: str) -> list[Call]:
    if body[:1] not in "{[":
        raise ValueError("no JSON")
    return [call for value in _read_values(body) for call in _json_calls(value)]


def _read_values(body: str) -> Iterator[Any]:
    """Read one value, or several one after the other."""
    decoder = json.JSONDecoder(strict=False)
    try:
        value, end = decoder.raw_decode(body)
    except ValueError:
        value, end = read_value(body), len(body)
    yield value
    rest = body[end:].lstrip("; \n,")
    if rest:
        yield from _read_values(rest)


def _json_calls(value: Any) -> list[Call]:
    if isinstance(value, list):
        return [call for item in value for call in _json_calls(item)]
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    if isinstance(value.get("function"), dict):  # as in OpenAI's own form
        value = value["function"]
    name = next((value[key] for key in NAMES if key in value), None)
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    if name is None and len(value) == 1 and arguments is None:  # Apertus writes {"f": {"n": 1}}
        [(name, arguments)] = value.items()
        return [(name, _require_object(arguments))]
    return [(name, _read_arguments(arguments))]


def _read_arguments(arguments: Any) -> dict[str, Any]:
    if arguments in (None, ""):  # of a function that takes none
        return {}
    return _require_object(read_value(arguments) if isinstance(arguments, str) else arguments)


def _require_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return value


def _read_named(body: str) -> list[Call]:
    matches = [NAMED.fullmatch(item.strip()) for item in ITEM_MARKS.split(body) if item.strip()]
    if not all(matches):
        raise ValueError("no name before an object")
    return [(match["name"], _require_object(read_value(match["arguments"]))) for match in matches if match]


def _read_tags(body: str) -> list[Call]:
    for call_tag, argument_tag in TAGS:
        found = list(call_tag.finditer(body))
        if found and not call_tag.sub("", body).strip():
            return [(html.unescape(call["name"].strip()), _read_tagged(call["body"], argument_tag)) for call in found]
    raise ValueError("no tags")


def _read_tagged(body: str, tag: re.Pattern[str]) -> dict[str, Any]:
    """Read the arguments of one call."""
    if body.strip().startswith("{"):  # Llama 3.1's: an object between the tags
        return _require_object(read_value(body))
    if tag.sub("", body).strip():
        raise ValueError("words between the tags")
    arguments: dict[str, Any] = {}
    for match in tag.finditer(body):
        kind = match.groupdict().get("kind")
        is_text = kind is None or kind in IS_TEXT
        arguments[html.unescape(match["key"].strip())] = match["value"] if is_text else read_value(match["value"])
    return arguments


def _read_pairs(body: str) -> list[Call]:
    name = PAIRS_NAME.fullmatch(PAIR.sub("", body))
    if name is None or not body.startswith(name["name"]):
        raise ValueError("no name before pairs")
    return [(name["name"], {match["key"].strip(): match["value"] for match in PAIR.finditer(body)})]


def _read_braces(body: str) -> list[Call]:
    match = BRACES.fullmatch(body)
    if match is None:
        raise ValueError("no call:")
    pieces = QUOTES.split(match["arguments"])
    written = "".join(
        json.dumps(piece) if number % 2 else BARE_KEY.sub(r'\1"\2"\3:', piece) for number, piece in enumerate(pieces)
    )
    return [(match["name"], _require_object(json.loads(written)))]


def _read_python(body: str) -> list[Call]:
    calls: list[Call] = []
    for statement in ast.parse(body).body:
        value = getattr(statement, "value", None)
        for node in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(node, ast.Call) or node.args:
                raise ValueError("no call with named arguments")
            named = {keyword.arg: _python_value(keyword.value) for keyword in node.keywords if keyword.arg}
            if len(named) < len(node.keywords):
                raise ValueError("arguments that are not named")
            calls.append((ast.unparse(node.func), named))
    return calls


def _python_value(node: ast.AST) -> Any:
    """Return what a literal means. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _python_value(value) for key, value in pairs if isinstance(key, ast.Constant)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _python_value(node.operand)
        if isinstance(value, int | float):
            return -value
    raise ValueError("no literal")


# --- arguments that came as text -----------------------------------------------------------------------------------


def fit_arguments(arguments: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Return arguments with texts read as the tool's schema has them, where it has them as something else than text."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return arguments
    return {
        name: _fit(value, _list_types(properties.get(name))) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


def _fit(text: str, types: set[str]) -> Any:
    if not types or ("string" in types and text.strip() not in ("null", "None")):
        return text
    try:
        value = read_value(text)
    except UNREADABLE:
        value = {"true": True, "false": False}.get(text.strip().lower(), text)
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value = int(value)
    return value if types & _kinds(value) else text


def _list_types(schema: Any) -> set[str]:
    """List the types that a JSON schema allows, as far as it says so."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    types |= {name for name in declared if isinstance(name, str)} if isinstance(declared, list) else set()
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else []:
            types |= _list_types(choice)
    return types | ({"null"} if schema.get("nullable") else set())


def _kinds(value: Any) -> set[str]:
    """List the types of JSON schemas that a value is one of."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    kinds = {dict: "object", list: "array", str: "string", type(None): "null"}
    return {kinds.get(type(value), "")}
