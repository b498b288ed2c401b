from peer.burst import Workload
from peer.machine_probe import MachineState
from peer.samples import Samples, alternate


class Scripted:
    """An engine that notes when it was asked and answers with the seed."""

    def __init__(self, name: str, asked: list[tuple[str, int]]) -> None:
        self.name = name
        self.asked = asked

    def measure(self, workload: Workload, seed: int) -> float:
        self.asked.append((self.name, seed))
        return float(seed)


def test_engines_take_turns_and_the_first_round_does_not_count():
    asked: list[tuple[str, int]] = []
    samples = Samples()
    state = MachineState(35, 40)
    engines = {"a": Scripted("a", asked), "b": Scripted("b", asked)}
    alternate(samples, {"decode": Workload("decode", 4, 4)}, engines, 2, lambda: state)
    assert asked == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert samples.values == {"decode": {"a": [1, 2], "b": [1, 2]}}
    assert samples.states == [state] * 3


def test_a_ratio_compares_within_rounds():
    # The machine doubled its speed in the second and third round; we are 1.5 times as fast in each.
    samples = Samples({"decode": {"ours": [150, 300, 306], "theirs": [100, 200, 200], "slow": [10, 10, 10]}})
    others = [("decode", "theirs"), ("decode", "slow")]
    assert samples.ratio(("decode", "ours"), others) == 1.5


def test_a_ratio_to_what_was_not_measured_is_none():
    assert Samples({"decode": {"ours": [1]}}).ratio(("decode", "ours"), [("decode", "theirs")]) is None


def test_samples_survive_json():
    samples = Samples({"m": {"e": [1.5]}}, [MachineState(35.0, 40.5)], {"tool": "1"}, {"e": "command"}, ["note"])
    assert Samples.from_json(samples.to_json()) == samples
