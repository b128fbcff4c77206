"""A disassembled kernel: instructions, basic blocks, and the natural loops among them.

Loops are found in the control flow, not in the order of addresses: compilers move the slow side of
a wait behind the end of the kernel, from where it branches back into the middle of a loop.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_\w+|\$?[\w$]+):")
_CODE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"\.L_\w+")
_ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP", "JMX", "BPT", "KILL")


@dataclass(frozen=True)
class Instruction:
    """One line of the listing; `opcode` with its suffixes, `predicate` empty when unconditional."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.split(".")[0]

    @property
    def targets(self) -> list[str]:
        """Labels that a branch may go to."""
        return _TARGET.findall(self.operands) if self.name in ("BRA", "BRX", "JMP", "JMX") else []

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        if self.name not in _ENDS:
            return True
        # BRA.U UP0, `(.L_x_1): a uniform predicate stands among the operands.
        return bool(self.predicate) or bool(re.match(r"!?U?P[\dT]", self.operands))


@dataclass(frozen=True)
class Loop:
    """A natural loop: the blocks between its header and the branches back to it."""

    header: int
    blocks: frozenset[int]
    code: tuple[Instruction, ...]

    def names(self) -> list[str]:
        return [instruction.name for instruction in self.code]


class Listing:
    """The code of one kernel as `nvdisasm -c` prints it."""

    def __init__(self, text: str) -> None:
        self.code: list[Instruction] = []
        labels: dict[str, int] = {}  # label -> index of the instruction behind it
        for line in text.splitlines():
            if found := _LABEL.match(line):
                labels[found[1]] = len(self.code)
            elif found := _CODE.match(line):
                self.code.append(Instruction(int(found[1], 16), found[2] or "", found[3], found[4]))
        if not self.code:
            raise ValueError("no instruction found in the listing")
        starts = {0, *(index for index in labels.values() if index < len(self.code))}
        starts |= {
            i + 1 for i, one in enumerate(self.code[:-1]) if one.targets or not one.falls_through
        }
        self._starts = sorted(starts)
        block_of = {start: number for number, start in enumerate(self._starts)}
        self._next: list[list[int]] = []
        for number in range(len(self._starts)):
            last = self._block(number)[-1]
            follow = [block_of[labels[t]] for t in last.targets if labels[t] < len(self.code)]
            if last.falls_through and number + 1 < len(self._starts):
                follow.append(number + 1)
            self._next.append(follow)

    def loops(self) -> list[Loop]:
        """All natural loops, those of one header joined, in the order of their headers."""
        reached, before = self._dominators()
        bodies: dict[int, set[int]] = {}
        for block in reached:
            for header in self._next[block]:
                if before[block] >> header & 1:
                    bodies.setdefault(header, {header}).update(self._reaching(block, header))
        return [self._loop(header, bodies[header]) for header in sorted(bodies)]

    def innermost(self, names: Sequence[str]) -> list[Loop]:
        """Loops that hold one of these instructions and no smaller loop that does."""
        holding = [loop for loop in self.loops() if set(names) & set(loop.names())]
        return [
            loop for loop in holding if not any(other.blocks < loop.blocks for other in holding)
        ]

    def count(self, *names: str) -> int:
        """How many instructions of the whole kernel have one of these names."""
        return sum(instruction.name in names for instruction in self.code)

    # --- inside

    def _block(self, number: int) -> list[Instruction]:
        ends = [*self._starts[1:], len(self.code)]
        return self.code[self._starts[number] : ends[number]]

    def _loop(self, header: int, blocks: set[int]) -> Loop:
        code = tuple(one for block in sorted(blocks) for one in self._block(block))
        return Loop(self._block(header)[0].address, frozenset(blocks), code)

    def _dominators(self) -> tuple[list[int], dict[int, int]]:
        """Blocks that can be reached, and for each a bit set of those on every way to it."""
        order = list(self._walk())
        into: dict[int, list[int]] = {block: [] for block in order}
        for block in order:
            for following in self._next[block]:
                into[following].append(block)
        everything = (1 << len(self._starts)) - 1
        before = dict.fromkeys(order, everything)
        before[0] = 1
        changed = True
        while changed:
            changed = False
            for block in order[1:]:
                common = everything
                for previous in into[block]:
                    common &= before[previous]
                common |= 1 << block
                changed |= common != before[block]
                before[block] = common
        self._into = into
        return order, before

    def _walk(self) -> Iterator[int]:
        seen, waiting = {0}, [0]
        while waiting:
            block = waiting.pop()
            yield block
            for following in self._next[block]:
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)

    def _reaching(self, block: int, header: int) -> set[int]:
        """Blocks from which `block` is reached without passing the header."""
        found, waiting = {block}, [block]
        while waiting:
            current = waiting.pop()
            if current == header:
                continue
            for previous in self._into[current]:
                if previous not in found:
                    found.add(previous)
                    waiting.append(previous)
        return found
