"""What is found of a workload is kept with it, and with no other."""

from dataclasses import replace

from attention_service.core.memo import once
from attention_service.cost.workload import Workload

WORK = Workload(batch=1, queries=4, keys=4, heads=2, kv_heads=2, head_dim=8, value_dim=8, itemsize=4)


def test_what_is_found_once_is_kept_with_the_workload_alone():
    asked = []

    @once
    def queries(work, kernel, *, more=0):
        asked.append((kernel, more))
        return work.queries + more

    work, other = replace(WORK), replace(WORK)
    assert [queries(work, "a"), queries(work, "a"), queries(work, "b"), queries(work, "a", more=1)] == [4, 4, 4, 5]
    assert asked == [("a", 0), ("b", 0), ("a", 1)]
    assert queries(replace(work, queries=9), "a") == 9
    assert queries(other, "a") == 4
    assert len(asked) == 5
    assert (work, work.key) == (other, other.key)
    assert queries.__name__ == "queries"
