"""What of the GPU suite can be known without a GPU."""

from __future__ import annotations

import pickle

from tests.gpu import prewarm


def test_kernels_are_shared_out_whole_and_can_be_sent_to_processes() -> None:
    work = prewarm.shares(["2:float32,bfloat16", "3:float32"], 5)
    assert pickle.loads(pickle.dumps(work)) == work
    assert len(work) == 5
    assert max(map(len, work)) - min(map(len, work)) <= 1
    names = [name for share in work for name, _ in share]
    assert sorted(names) == sorted({*names})
    wanted = {
        spec.name
        for n, names in ((2, ("float32", "bfloat16")), (3, ("float32",)))
        for spec in prewarm.kernels(n, names)
    }
    assert {*names} == wanted
    assert {"one_shot.ll-float32-n2", "one_shot.ll-float32-n2-any", "two_shot.flag-bfloat16-n3-late"} <= wanted
