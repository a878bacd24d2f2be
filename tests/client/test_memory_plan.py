"""Plans as people read them."""

from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step


def test_a_plan_in_words() -> None:
    assert str(PLAIN) == "plain"
    assert str(MemoryPlan(16)) == "attack 16 at a time"
    assert str(MemoryPlan(16, Step.FUSED)) == "attack 16 at a time, step fused into backward"
    assert str(MemoryPlan(step=Step.ATOMS)) == "step atom by atom"
    assert str(MemoryPlan(8, Step.PIECES, 4)) == "attack 8 at a time, step atom by atom in pieces of 4"
    assert str(MemoryPlan(0, Step.ATOMS, rounded=True)) == "step atom by atom, activations kept in bfloat16 (rounded)"
