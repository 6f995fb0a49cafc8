"""CUDA C++ to C++: inline PTX becomes calls of the functions of ptx.h.

    asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    { u32 a0; u32 a1 = u32(a); u32 a2 = u32(b); ptx::sub_f16x2(a0, a1, a2); r = a0; }

An instruction without such a function is an error of the compiler that names it. The source has been through
the preprocessor: macros make instructions, too, and what other GPUs compile is gone. Of the rest two things
change: declarations of shared memory, and conversions to int, of which CUDA says what becomes of NaN.
"""

from __future__ import annotations

import re

_ASM = re.compile(r"\basm\b(?:\s+volatile)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SHARED = re.compile(r"__shared__ (?:__align__\((\d+)\) )?(\w+(?:<[\w:]+>)?) ([^;]+);")
_OPERAND = re.compile(r'\s*"([=+]?)([rhfln])"\s*\(')
_LABEL, _PREDICATE = re.compile(r"(\w+):\s+"), re.compile(r"@(!?\w+)\s+")
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\s*(?=\())?')
_NAME = re.compile(r"\s*(\w+)\s*\(")
_TYPES = {"r": "u32", "h": "u16", "f": "float", "l": "u64", "n": "int"}
_REGISTERS = {"b32": "u32", "u32": "u32", "f32": "float", "f16": "u16", "pred": "bool"}


def translate(source: str) -> str:
    """A preprocessed source with its PTX as calls, and behind each kernel what starts it."""
    parts, done = [], 0
    for match in _ASM.finditer(source):
        end = _closing(source, match.end())
        statement = source[match.end() : end]
        after = source.index(";", end) + 1
        parts += [source[done : match.start()], _calls(statement), "\n" * statement.count("\n")]
        done = after
    result = "".join((*parts, source[done:])).replace("extern __shared__", "extern")
    result = _SHARED.sub(_shared, result)
    return re.sub(r"\bint\(", "to_int(", _with_starts(result))


def _with_starts(source: str) -> str:
    """A line for each kernel."""
    parts, done = [], 0
    for match in _KERNEL.finditer(source):
        at = match.end()
        if source[at] == "(":
            at = _closing(source, at + 1) + 1
        name = _NAME.match(source, at)
        assert name is not None, source[match.start() : at]
        body = source.index("{", _closing(source, name.end()))
        end = _closing(source, body + 1) + 1
        parts += [source[done:end], f" EMULATED_KERNEL({name[1]})"]
        done = end
    return "".join((*parts, source[done:]))


def _shared(declaration: re.Match[str]) -> str:
    """Arrays of fixed size in shared memory: references to what is theirs."""
    edge, kind, names = declaration.groups()
    made = []
    for declared in names.split(", "):
        name, *sizes = declared.replace("]", "").split("[")
        dims = "".join(f"[({size})]" for size in sizes)
        made.append(f"static auto& {name} = emulated::fixed<{kind}{dims}>({edge or ''});")
    return " ".join(made)


def _closing(text: str, at: int) -> int:
    """Where the bracket closes that is open at `at`."""
    depth = 1
    while depth:
        string = _STRING.match(text, at)
        if string:
            at = string.end()
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return at - 1


def _calls(statement: str) -> str:
    """A block for one asm statement: operands to locals, a call per instruction, results back."""
    code = ""
    at = 0
    while string := re.compile(r"\s*" + _STRING.pattern).match(statement, at):
        code, at = code + string[1].replace("\\n", "\n"), string.end()
    before, after = [], []
    number = 0
    while at < len(statement):
        operand = _OPERAND.match(statement, at)
        if operand is None:  # a colon, a comma, what is clobbered
            at += 1
            continue
        end = _closing(statement, operand.end())
        expression, kind = statement[operand.end() : end], _TYPES[operand[2]]
        local = f"a{number}"
        before.append(f"{kind} {local};" if operand[1] == "=" else f"{kind} {local} = {kind}({expression});")
        if operand[1]:
            after.append(f"{expression} = {local};")
        number, at = number + 1, end + 1
    code = code.strip()
    code = code[1:-1] if code.startswith("{") and code.endswith("}") else code
    lines = [line.strip() for line in code.split(";") if line.strip()]
    labels = [f"__label__ {label[1]};" for label in map(_LABEL.match, lines) if label]
    return " ".join(("{", *labels, *before, *map(_call, lines), *after, "}"))


def _call(instruction: str) -> str:
    label = _LABEL.match(instruction)
    if label:
        return f"{label[1]}: {_call(instruction[label.end() :])}"
    predicate = _PREDICATE.match(instruction)
    if predicate:
        return f"if ({predicate[1]}) {_call(instruction[predicate.end() :])}"
    opcode, _, operands = instruction.partition(" ")
    operands = re.sub(r"%(\d+)", r"a\1", re.sub(r"[\[\]{}]", " ", operands))
    operands = operands.replace("%%tid.", "threadIdx.").replace("%%ctaid.", "blockIdx.")
    operands = operands.replace("|", ",")  # two results
    if opcode == ".reg":
        kind, _, names = operands.partition(" ")
        return f"{_REGISTERS[kind.lstrip('.')]} {names};"
    if opcode in ("bra", "bra.uni"):
        return f"goto {operands};"
    name = opcode.replace("::", "__").replace(".", "_")
    return f"ptx::{name}({', '.join(operand.strip() for operand in operands.split(','))});"
