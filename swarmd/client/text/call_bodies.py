"""What stands between the marks of a call, in the ways in which families write it: names and arguments come out of it.

Each reader takes a body whole or raises ValueError; no body is taken by two of them. What models often get wrong and
what has one meaning only is read all the same: a line break in a string, a comma after the last, single quotes. Every
reader goes through a body a fixed number of times, whatever a model wrote.
"""

from __future__ import annotations

import ast
import html
import json
import keyword
import re
from collections.abc import Collection
from typing import Any, NamedTuple

# Where          who                                      body
# _read_json     Hermes, Qwen 2 and 3, Llama 3, Granite,  {"name": "f", "arguments": {"n": 1}}, or a list of such
#                Mistral, Phi-4, Command R, SmolLM3
# _read_named    Mistral since v11, DeepSeek V3, Kimi K2  f[ARGS]{"n": 1}   function<sep>f ```json {"n": 1} ```
# _read_tags     Qwen3-Coder and 3.5, Seed, MiniMax M2,   <function=f><parameter=n>1</parameter></function>
#                DeepSeek V3.2, Kimi K3                   <invoke name="f"><parameter name="n">1</parameter></invoke>
# _read_pairs    GLM 4.5 to 4.7                           f <arg_key>n</arg_key><arg_value>1</arg_value>
# _read_braces   Gemma 4, FunctionGemma                   call:f{n:1,text:<|"|>a<|"|>}
# _read_python   Llama 4, LFM2, Olmo 3                    [f(n=1, text="a")]
NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters", "args", "input")
OTHERS = ("type", "id", "tool_call_id", "index")  # that stand beside them and say nothing more
NAME = re.compile(r"[\w./:@-]{1,128}")
ITEM_MARKS = re.compile(r"<｜tool▁call▁(?:begin|end)｜>|<\|tool_call_(?:begin|end)\|>")
MOST_HEAD = 256  # characters before an object: a name and a mark
HEAD = re.compile(
    r"(?:function<｜tool▁sep｜>|functions\.)?(?P<name>[\w.-]{1,128}?)(?::\d{1,4})? ?"
    r"(?:(?:\[CALL_ID\]\w{1,64})?\[ARGS\]|<｜tool▁sep｜>|```(?:json)?|<\|tool_call_argument_begin\|>)? ?"
)
UNREADABLE = (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError)
"""What Python's own readers raise for a text that is none: its parser has too deep ones end for want of memory."""


class Call(NamedTuple):
    """What stands for a name, and arguments, as far as there are any.

    ``is_text``: all values came as texts, and may be meant as something else.
    """

    name: Any
    arguments: dict[str, Any]
    is_text: bool = False
    has_arguments: bool = True


def read_calls(body: str, is_closed: bool, known: Collection[str] = (), name: str = "") -> list[Call]:
    """Read the calls that stand between two marks, of functions that may be ``known``. Raises ValueError.

    ``is_closed``: whether the second mark was written. A ``name`` that stood in the first has the arguments as body.
    """
    if name:
        return [Call(name, {} if is_closed and not body.strip() else _require_arguments(body))]
    for read in (_read_json, _read_named, _read_tags, _read_braces, _read_python):
        try:
            calls = read(body.strip())
        except UNREADABLE:
            continue
        if calls:
            return calls
    if is_closed:  # one that was cut off behind an argument looks whole
        return _read_pairs(body.strip(), known)
    raise ValueError("a call that was not written as any model should")


# --- values --------------------------------------------------------------------------------------------------------

JSON_STRING = r'"(?:[^"\\]|\\.)*+"'
PYTHON_STRING = rf"{JSON_STRING}|'(?:[^'\\]|\\.)*+'"
STRING_OR_COMMA = re.compile(rf"({JSON_STRING})|,(?=\s{{0,64}}[}}\]])", re.DOTALL)
PYTHON_PIECE = re.compile(
    rf"(?P<string>{PYTHON_STRING})|(?P<word>(?<=[(,\s])(?:{'|'.join(keyword.kwlist)})(?= ?=[^=]))", re.DOTALL
)
BETWEEN_STRINGS = re.compile(r"[\s\w]*")
KEYWORD_MARK = "_a_keyword_of_python"
CONSTANTS = {"true": True, "false": False, "null": None}


def ends_in_string(body: str) -> bool:
    """Does JSON that was cut off end within a string?"""
    return body.lstrip()[:1] in ("{", "[") and '"' in re.sub(JSON_STRING, "", body, flags=re.DOTALL)


def read_value(text: str) -> Any:
    """Read JSON, or what is nearly that. Raises one of UNREADABLE."""
    for written in (text, STRING_OR_COMMA.sub(r"\1", text)):
        try:
            return DECODER.decode(written.strip())
        except json.JSONDecodeError:
            continue
    if "'" not in text and not re.search(r"\b(?:None|True|False)\b", text):
        raise ValueError("neither JSON nor nearly that")
    return _python_value(_parse_python(text).body[0])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object. Raises ValueError where one name has two values."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name that has two values")
    return made


DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_unique)


def _read_object(text: str) -> dict[str, Any]:
    return _require_object(read_value(text))


def _require_arguments(body: str) -> dict[str, Any]:
    try:
        return _read_object(body)
    except UNREADABLE:
        raise ValueError("no object") from None


def _require_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return value


def _parse_python(text: str) -> ast.Module:
    """Parse Python that a model wrote: with line breaks in strings, and arguments called as Python calls none."""
    end = 0
    for string in re.finditer(PYTHON_STRING, text, re.DOTALL):
        if end and BETWEEN_STRINGS.fullmatch(text, end, string.start()):  # Python would join them: "say "u" x"
            raise ValueError("a string that ends within itself")
        end = string.end()

    def mend(match: re.Match[str]) -> str:
        return match[0].replace("\n", "\\n") if match["string"] else match[0] + KEYWORD_MARK

    return ast.parse(PYTHON_PIECE.sub(mend, text.strip()))


def _python_value(node: ast.AST | None) -> Any:
    """Return what a literal means. Raises ValueError for anything else."""
    if isinstance(node, ast.Expr):
        return _python_value(node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return _unique(
            [(str(key.value), _python_value(value)) for key, value in pairs if isinstance(key, ast.Constant)]
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _python_value(node.operand)
        if isinstance(value, int | float):
            return -value
    raise ValueError("no literal")


# --- bodies --------------------------------------------------------------------------------------------------------


def _read_json(body: str) -> list[Call]:
    if body[:1] not in ("{", "["):
        raise ValueError("no JSON")
    values: list[Any] = []
    while body:
        try:
            value, end = DECODER.raw_decode(body)
        except json.JSONDecodeError:
            value, end = read_value(body), len(body)
        values.append(value)
        body = body[end:].lstrip("; \n,")
    return [call for value in values for call in _json_calls(value)]


def _json_calls(value: Any) -> list[Call]:
    if isinstance(value, list):
        return [call for item in value for call in _json_calls(item)]
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    if isinstance(value.get("function"), dict):  # as in OpenAI's own form
        value = value["function"]
    names = [key for key in NAMES if key in value]
    keys = [key for key in ARGUMENTS if key in value]
    if not names and not keys and len(value) == 1:  # Apertus writes {"f": {"n": 1}}
        [(name, arguments)] = value.items()
        return [Call(name, _require_object(arguments))]
    if not names or len(keys) > 1 or set(value) - {*names, *keys, *OTHERS}:
        raise ValueError("words that are no part of a call")
    arguments = value[keys[0]] if keys else None
    if arguments in (None, ""):  # of a function that takes none
        arguments = {}
    read = _read_object(arguments) if isinstance(arguments, str) else _require_object(arguments)
    return [Call(value[names[0]], read, has_arguments=bool(keys))]


def _read_named(body: str) -> list[Call]:
    calls = []
    for item in ITEM_MARKS.split(body):
        if not item.strip():
            continue
        head, brace, rest = item.partition("{")
        match = HEAD.fullmatch(" ".join(head.split())) if brace and len(head) <= MOST_HEAD else None
        if match is None:
            raise ValueError("no name before an object")
        calls.append(Call(match["name"], _read_object("{" + rest.strip().removesuffix("```"))))
    return calls


class Tags(NamedTuple):
    """How calls and arguments are written as tags: what begins and ends one and the other."""

    call: str
    call_end: str
    argument: str
    argument_end: str
    has_lines: bool = False  # a value stands on lines of its own

    def pattern(self) -> re.Pattern[str]:
        """One pattern of all four, each a group by its name."""
        return re.compile(
            f"(?P<call>{self.call})|(?P<call_end>{self.call_end})|(?P<argument>{self.argument})"
            f"|(?P<argument_end>{self.argument_end})"
        )


TAGS = {
    tags: tags.pattern()
    for tags in (
        Tags(
            *(r"<function=(?P<name>[^>\n]{1,128})>", "</function>"),
            *(r"<parameter=(?P<key>[^>\n]{1,128})>(?P<kind>)", "</parameter>"),
            has_lines=True,
        ),
        Tags(
            *(r'<(?:｜DSML｜)?invoke name="(?P<name>[^"\n]{1,128})">', "</(?:｜DSML｜)?invoke>"),
            r'<(?:｜DSML｜)?parameter name="(?P<key>[^"\n]{1,128})"(?: string="(?P<kind>\w{1,16})")?>',
            "</(?:｜DSML｜)?parameter>",
        ),
        Tags(
            *(r'<\|open\|>call tool="(?P<name>[^"\n]{1,128})"[^<\n]{0,64}<\|sep\|>', r"<\|close\|>call<\|sep\|>"),
            r'<\|open\|>argument key="(?P<key>[^"\n]{1,128})" type="(?P<kind>\w{1,16})"<\|sep\|>',
            r"<\|close\|>argument<\|sep\|>",
        ),
    )
}
IS_TEXT = ("", "string", "true")  # what tags say of a value that is text whatever it looks like


def _read_tags(body: str) -> list[Call]:
    for tags, pattern in TAGS.items():
        if pattern.match(body):
            return _read_tagged(body, tags, pattern)
    raise ValueError("no tags")


def _read_tagged(body: str, tags: Tags, pattern: re.Pattern[str]) -> list[Call]:
    # From one mark to the next: whatever stands between two of them is a value, or must be blank.
    calls: list[Call] = []
    name, key, end = "", None, 0
    arguments: list[tuple[str, Any]] = []
    for match in pattern.finditer(body):
        between = body[end : match.start()]
        kind = match.lastgroup if match.lastgroup in ("call_end", "argument_end") else None
        if key is not None:
            if kind != "argument_end":
                continue  # a mark within a value is text
            is_text = key["kind"] is None or key["kind"] in IS_TEXT
            value = _own_lines(between) if tags.has_lines else between
            arguments.append((html.unescape(key["key"].strip()), value if is_text else read_value(value)))
            key = None
        elif kind == "call_end" and name:
            if between.strip() and arguments:
                raise ValueError("words between the tags")
            given = _read_object(between) if between.strip() else _unique(arguments)
            calls.append(Call(name, given, is_text=not between.strip()))
            name, arguments = "", []
        elif between.strip() or kind or bool(match["call"]) == bool(name):
            raise ValueError("words between the tags, or tags in another order")
        elif match["call"]:
            name = html.unescape(match["name"].strip())
        else:
            key = match
        end = match.end()
    if name or key is not None or body[end:].strip():
        raise ValueError("a call that is not closed")
    return calls


def _own_lines(value: str) -> str:
    """Return a value without the line breaks that stand around it, if both do."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == "\n" else value


PAIR_MARK = re.compile(r"(</?arg_(?:key|value)>)")
PAIR = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _read_pairs(body: str, known: Collection[str]) -> list[Call]:
    """Read a name and pairs; one word alone is a call if it is the name of a function that is ``known``."""
    name, *rest = PAIR_MARK.split(body)
    name = name.strip()
    groups = [rest[place : place + 8] for place in range(0, len(rest), 8)]
    if not NAME.fullmatch(name) or (not groups and name not in known):
        raise ValueError("no name before pairs")
    pairs = []
    for group in groups:
        if tuple(group[::2]) != PAIR or group[3].strip() or group[7].strip():
            raise ValueError("no key and its value")
        pairs.append((group[1].strip(), group[5]))
    return [Call(name, _unique(pairs), is_text=True)]


BRACES = re.compile(r"call:(?P<name>[\w.-]{1,128})(?P<arguments>\{.*\})", re.DOTALL)
QUOTES = ('<|"|>', "<escape>")
BARE_KEY = re.compile(r"(?<=[{,])(\s{0,8})([\w.$-]{1,128})(\s{0,8}):")
PYTHONS_WORDS = {"None": "null", "True": "true", "False": "false"}


def _read_braces(body: str) -> list[Call]:
    match = BRACES.fullmatch(body)
    if match is None:
        raise ValueError("no call:")
    quote = next((quote for quote in QUOTES if quote in body), QUOTES[0])

    def rewrite(piece: str) -> str:
        quoted = BARE_KEY.sub(r'\1"\2"\3:', piece)
        return re.sub(r"(?<=[\[,:])\s{0,8}(None|True|False)\b", lambda word: PYTHONS_WORDS[word[1]], quoted)

    pieces = match["arguments"].split(quote)
    written = "".join(json.dumps(piece) if number % 2 else rewrite(piece) for number, piece in enumerate(pieces))
    return [Call(match["name"], _require_object(DECODER.decode(written)))]


def _read_python(body: str) -> list[Call]:
    if "(" not in body:
        raise ValueError("no call")
    calls: list[Call] = []
    for statement in _parse_python(body).body:
        value = getattr(statement, "value", None)
        for node in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(node, ast.Call) or node.args:
                raise ValueError("no call with named arguments")
            named = [(keyword_.arg, _python_value(keyword_.value)) for keyword_ in node.keywords]
            if any(name is None for name, _ in named):
                raise ValueError("arguments that are not named")
            pairs = [(str(name).removesuffix(KEYWORD_MARK), value) for name, value in named]
            calls.append(Call(ast.unparse(node.func), _unique(pairs)))
    return calls


# --- texts that the tool's schema has as something else ------------------------------------------------------------

MOST_DEPTH = 16  # of references and unions: what lies deeper is taken as it came
MOST_INTEGER = 2**53  # above it a float is another number than was written
NUMBER = re.compile(r"-?\d{1,308}(?:\.\d{1,308})?(?:[eE][+-]?\d{1,3})?")


def fit_arguments(call: Call, schema: Any) -> dict[str, Any]:
    """Return arguments with texts read as the schema has them, where it has something else than text."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return call.arguments
    return {
        name: _fit(value, list_types(properties.get(name), schema), call.is_text) if isinstance(value, str) else value
        for name, value in call.arguments.items()
    }


def _fit(text: str, types: set[str], is_text: bool) -> Any:
    is_null = is_text and "null" in types and text.strip() == "null"
    if not types or ("string" in types and not is_null):
        return text
    value = _read_text(text.strip())
    if isinstance(value, float) and "number" not in types and value.is_integer() and abs(value) < MOST_INTEGER:
        value = int(value)
    return value if types & _kinds(value) else text


def _read_text(text: str) -> Any:
    """Read a number, a constant, an object or a list, and nothing else that may look like a value."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("null", "None"):
        return None
    if NUMBER.fullmatch(text):
        value = json.loads(text)
        return value if abs(value) < float("inf") else text
    if text[:1] in ("{", "["):
        try:
            return read_value(text)
        except UNREADABLE:
            pass
    return text


def list_types(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """List the types that a JSON schema allows, as far as it says so; ``root`` is what its references are into."""
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        types = {declared}
    elif isinstance(declared, list):
        types = {name for name in declared if isinstance(name, str)}
    else:
        types = {"object"} if "properties" in schema else {"array"} if "items" in schema else set()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        for value in values if isinstance(values, list) else []:
            types |= _kinds(value)
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else []:
            types |= list_types(choice, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        types |= list_types(_look_up(root, schema["$ref"]), root, depth + 1)
    return types | ({"null"} if schema.get("nullable") else set())


def _look_up(root: Any, reference: str) -> Any:
    """Return what a reference into a schema names; None where it names nothing there."""
    found = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found


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
