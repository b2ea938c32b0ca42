"""Finds registers that machine code of sm_90 reads although nothing has set them on some path to there.

ptxas 12.8 moves what two loops in sequence share into the preparation of the first of them, and where that loop is
skipped the second reads whatever its registers held. Seen on an H200: wrong numbers at one shape, an illegal memory
access at another, right ones at most. What is left over from earlier code cannot be told from what was meant, so a
clean report is no proof; a finding is one.
"""

import re
from typing import NamedTuple

REGISTER = re.compile(r"\b(U?R)(\d+)\b")
PREDICATE = re.compile(r"!?U?P[T\d]")
# Operations whose first register is an operand, beside those that begin with these.
WITHOUT_RESULT = (
    *("ST", "BAR", "SYNCS", "UTMA", "RED.", "BRA", "BRX", "EXIT", "WARP", "NANOSLEEP", "MEMBAR", "FENCE"),
    *("BSYNC", "BSSY", "USETMAXREG", "CCTL", "ERRBAR", "DEPBAR", "BREAK", "YIELD", "NOP", "UBLK", "ELECT"),
)
# A register of which one bit is cleared, to keep a predicate there: what its others hold is then of no interest.
KEEPS_A_PREDICATE = re.compile(r"LOP3\.LUT R(\d+), R\1, 0x(?=[0-9a-f]{8},)f*[7bde]f*, RZ, 0xc0, !PT")
# A register whose lower half is set: its upper half is kept, and of interest only where that is set too.
KEEPS_A_HALF = re.compile(r"PRMT R(\d+), (\S+), 0x7610, R\1$")
# Takes a register to a uniform one: what is unset is so there too, and found where it is computed with.
COPY = re.compile(r"R2UR UR\d+, R\d+$")
UNIFORM = 256
"""The number of UR0; R0 is number 0."""


class Instruction(NamedTuple):
    text: str
    reads: int
    """A bit for each register, as for what it sets."""
    sets: int

    @property
    def copies(self) -> bool:
        return COPY.match(self.text) is not None


def unset_registers(disassembly: str) -> list[str]:
    """The instructions in what `nvdisasm -c` prints that read a register which some path leaves unset."""
    instructions, labels = _parse(disassembly)
    set_before: list[int | None] = [None] * len(instructions)
    set_before[0] = 0
    to_visit = [0]
    while to_visit:
        at = to_visit.pop()
        instruction = instructions[at]
        unset = instruction.copies and instruction.reads & ~set_before[at]
        after = set_before[at] & ~instruction.sets if unset else set_before[at] | instruction.sets
        for successor in _successors(instruction.text, at, labels):
            known = set_before[successor]
            now = after if known is None else known & after
            if now != known:
                set_before[successor] = now
                to_visit.append(successor)
    reached = zip(instructions, set_before, strict=True)
    return [x.text for x, known in reached if known is not None and x.reads & ~known and not x.copies]


def _parse(disassembly: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions, labels = [], {}
    for line in disassembly.splitlines():
        if label := re.match(r"(\.L\S+):", line.strip()):
            labels[label.group(1)] = len(instructions)
        if found := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", line):
            text = re.sub(r"[{}]", "", found.group(1)).strip()
            instructions.append(Instruction(text, *_reads_and_sets(text)))
    return instructions, labels


def _successors(text: str, at: int, labels: dict[str, int]) -> list[int]:
    branch = re.match(r"(@!?U?P[T\d] )?(BRA|EXIT|BRX)\b", text)
    if branch is None:
        return [at + 1]
    may_go_on = branch.group(1) or ".DIV" in text or re.search(r"BRA\S*\s+!?U?P", text)
    return [labels[label] for label in re.findall(r"\.L_x_\d+", text)] + [at + 1] * bool(may_go_on)


def _reads_and_sets(text: str) -> tuple[int, int]:
    _, operation, operands = re.match(r"(@!?U?P[T\d] )?(\S+)\s*(.*)", text).groups()
    operands = [operand.strip() for operand in operands.split(",")] if operands else []
    if operation.startswith("HGMMA"):
        return _of_product(operation, operands)
    if kept := KEEPS_A_PREDICATE.search(text):
        return 0, _bits("R", kept.group(1), 1)
    if KEEPS_A_HALF.search(text):
        operands.pop()
    result = _place_of_result(operation, operands)
    reads = sets = 0
    for place, operand in enumerate(operands):
        for kind, number in REGISTER.findall(operand):
            if place == result:
                sets |= _bits(kind, number, _width(operation))
            else:
                is_pair = f"{kind}{number}.64" in operand or operand.startswith(f"desc[{kind}{number}]")
                reads |= _bits(kind, number, 2 if is_pair else 1)
    return reads, sets


def _of_product(operation: str, operands: list[str]) -> tuple[int, int]:
    """Of HGMMA: accumulator, A in four registers or a descriptor, then B's descriptor or both in four uniform ones."""
    columns = int(re.search(r"64x(\d+)x", operation).group(1))
    accumulator = _bits(*REGISTER.search(operands[0]).groups(), columns // 2)
    a_in_registers = not operands[1].startswith("gdesc")
    reads = _bits(*REGISTER.search(operands[1]).groups(), 4) if a_in_registers else 0
    kind, first = REGISTER.search(operands[1 + a_in_registers]).groups()
    reads |= _bits(kind, int(first) + 2, 2) if a_in_registers else _bits(kind, first, 4)
    if not operands[2 + a_in_registers].startswith("RZ"):
        reads |= accumulator
    return reads, accumulator


def _place_of_result(operation: str, operands: list[str]) -> int | None:
    """Behind predicates, if any; comparisons set those alone."""
    if operation.startswith(WITHOUT_RESULT) or "SETP" in operation:
        return None
    behind = next((place for place, x in enumerate(operands) if not PREDICATE.fullmatch(x)), None)
    return behind if behind is not None and re.fullmatch(r"U?R(Z|\d+)", operands[behind]) else None


def _width(operation: str) -> int:
    if ".128" in operation or ".M88.4" in operation:
        return 4
    is_pair = re.search(r"\.64\b|WIDE", operation) or (operation.startswith("CS2R") and ".32" not in operation)
    return 2 if is_pair else 1


def _bits(kind: str, first: str | int, count: int) -> int:
    return ((1 << count) - 1) << (int(first) + UNIFORM * (kind == "UR"))
