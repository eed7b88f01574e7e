"""In which order XLA's CPU client runs the operations of a step.

It walks back from a program's results, and runs what each of them needs just before it. The results are the stepped
parameters, and are walked from the last to the first: a gradient that leads to an earlier layer runs when a parameter
of that layer, or one that comes after it, asks for it. So a Llama's layer, whose norms come after its projections, runs
all of its backward before any gradient of a projection; a GPT-2's computes each where it comes upon it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchacc.memory_plan.trace import Trace


def in_xla_order(trace: Trace) -> Trace:
    """Return a step whose operations are in the order in which they run under XLA."""
    needs, writers = _needs(trace)
    weights = _weigh(trace, needs)
    needs = [sorted(each, key=weights.__getitem__, reverse=True) for each in needs]
    results = [writers[value] for value in reversed(list(trace.gradients.values())) if value in writers]
    order = _walk([*results, *range(len(needs))], needs)  # at last what no gradient needs, such as the loss
    num_forward = next((at for at, time in enumerate(order) if time >= trace.num_forward), trace.num_forward)
    return replace(trace, operations=tuple(trace.operations[time] for time in order), num_forward=num_forward)


def _needs(trace: Trace) -> tuple[list[list[int]], dict[int, int]]:
    """Return for each operation those whose results it needs, and for each value its last writer."""
    writers: dict[int, int] = {}
    needs = []
    for time, operation in enumerate(trace.operations):
        needs.append(list(dict.fromkeys(writers[value] for value in operation.needs if value in writers)))
        changed = operation.makes or tuple(read.value for read in operation.reads[:1])  # in place: the first
        writers.update(dict.fromkeys(changed, time))
    return needs, writers


def _weigh(trace: Trace, needs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return what XLA sorts by: how often all before an operation is read, and then its bytes.

    Both are summed along each path, and bounded: by the number of operations, and by the bytes of what came before.
    """
    users = Counter(need for each in needs for need in each)
    weights: list[tuple[int, int]] = []
    total = 0
    for time, operation in enumerate(trace.operations):
        nbytes = sum(trace.values[value].nbytes for value in operation.makes)
        total += nbytes
        reads = users[time] - 1 + sum(weights[need][0] for need in needs[time])
        nbytes += sum(weights[need][1] for need in needs[time])
        weights.append((min(max(reads, 0), len(needs)), min(nbytes, total)))
    return weights


def _walk(results: Sequence[int], needs: Sequence[Sequence[int]]) -> list[int]:
    """Return operations so that each comes after all that it needs, and as late as that allows."""
    order: dict[int, None] = {}
    for result in results:
        order.update(dict.fromkeys(_before(result, needs, order)))
    return list(order)


def _before(last: int, needs: Sequence[Sequence[int]], done: dict[int, None]) -> Iterator[int]:
    """Yield an operation after all that it needs and that is not done."""
    if last in done:
        return
    seen, stack = {last}, [(last, iter(needs[last]))]
    while stack:
        time, rest = stack[-1]
        following = next((need for need in rest if need not in seen and need not in done), None)
        if following is None:
            stack.pop()
            yield time
        else:
            seen.add(following)
            stack.append((following, iter(needs[following])))
