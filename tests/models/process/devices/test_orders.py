"""Orders: what a model does by numbers, and a group that ends when its processes fail apart."""

import json
import struct
import threading
from io import BytesIO

import pytest

from attention_contract.errors import InvalidRequest
from attention_service.core.cancellation import Cancellation, cancellable, checkpoint
from attention_service.models.inputs.long_texts import TextsRead, read_beside, reading_beside
from attention_service.models.process.devices import device_group
from attention_service.models.process.devices.device_group import DeviceGroup
from attention_service.models.process.devices.orders import Orders
from attention_service.models.process.devices.spread_model import SpreadModel
from attention_service.models.process.served import Answer, PricedRun
from attention_service.models.worker_messages import WorkerMessage, pieces_of, read_message


class Generation:
    told_late = None

    def __init__(self):
        self.unread, self.has_ended, self.left, self.steps = 3, False, False, []

    def is_late(self):
        return len(self.steps) == 1

    def leave(self):
        self.left = True


class Model:
    """A model whose works are those of a test."""

    def __init__(self, work):
        self.work, self.asked = work, []
        self.loaded = type("Loaded", (), {"device": type("Device", (), {"is_cuda": False})})

    def prepare(self, operation, body, facts, emit):
        self.asked.append((operation, bytes(body), facts["free_bytes"]))
        emit(b"event")
        return PricedRun(10, self.work, question="asked", group="alike")

    def answer_joined(self, questions):
        return [Answer(tokens=len(questions)) for _ in questions]

    def read(self, running, most):
        for one in running:
            one.unread -= most
        return {}

    def step(self, running):
        for one in running:
            one.steps.append(one.told_late)
        return {}

    def finish(self, running):
        return Answer(tokens=len(running.steps))


def result_of(step):
    """What a step returns, or raises."""
    try:
        return step()
    except Exception as fault:
        return fault


class Together:
    """A group of two processes without pipes: each step is taken by both models."""

    def __init__(self, other):
        self.other, self.orders = Orders(other), []

    def order(self, kind, facts, body, step):
        message = WorkerMessage(kind, json.loads(json.dumps(facts)), memoryview(b"".join(body)))
        self.orders.append((kind, facts))
        theirs = result_of(lambda: self.other.perform(message))
        ours = result_of(lambda: step(message))
        assert type(ours) is type(theirs)
        if isinstance(ours, Exception):
            raise ours
        return ours


def spread(work):
    """A model of two processes, whose works are made by ``work``, and both of them."""
    one, other = Model(work()), Model(work())
    group = Together(other)
    return SpreadModel(one, group, 2), one, other, group


def prepared(model, emit=lambda _: None):
    return model.prepare("forward", memoryview(b"{}"), {"free_bytes": 100}, emit)


def test_both_processes_prepare_and_run_and_the_memory_is_that_of_both():
    model, one, other, _ = spread(lambda: lambda: Answer(tokens=7))
    events = []
    work = prepared(model, events.append)
    assert (work.needed_bytes, work.group, events) == (20, "alike", [b"event"])
    assert one.asked == other.asked == [("forward", b"{}", 50)]
    assert work.run() == Answer(tokens=7)


def test_work_that_is_priced_again_and_parts_go_on_in_both():
    taken = []

    def parts(name):
        taken.append((name, 1))
        yield 0.5
        taken.append((name, 2))
        return Answer(tokens=2)

    names = iter("ab")

    def work():
        name = next(names)
        return lambda: PricedRun(30, lambda: parts(name))

    model, *_ = spread(work)
    again = prepared(model).run()
    assert again.needed_bytes == 60
    running = again.run()
    assert next(running) == 0.5
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value == Answer(tokens=2)
    assert sorted(taken) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_parts_that_are_closed_are_closed_in_both():
    closed = []

    def parts():
        try:
            yield 0.0
        finally:
            closed.append(True)

    model, *_ = spread(lambda: parts)
    running = prepared(model).run()
    next(running)
    running.close()
    assert closed == [True, True]


def test_generations_step_in_both_and_one_clock_tells_which_step_is_the_last():
    made = []

    def work():
        def run():
            made.append(Generation())
            return made[-1]

        return run

    model, *_ = spread(work)
    running = prepared(model).run()
    assert (running.unread, running.has_ended) == (3, False)
    assert model.read([running], 2) == {}
    model.step([running])
    model.step([running])
    assert made[0].steps == made[1].steps == [False, True]
    assert model.finish(running) == Answer(tokens=2)
    other = prepared(model).run()
    other.leave()
    assert [one.left for one in made[2:]] == [True, True]
    running.leave()  # one whose answer could not be written
    assert [one.left for one in made[:2]] == [False, False]


def test_questions_share_a_pass_by_their_numbers():
    model, *_ = spread(lambda: Answer)
    works = [prepared(model) for _ in range(3)]
    assert model.answer_joined([work.question for work in works]) == [Answer(tokens=3)] * 3


def test_what_nobody_names_any_more_is_forgotten_by_the_next_order():
    model, _, _, group = spread(lambda: Answer)
    work = prepared(model)
    del work
    prepared(model)
    assert group.orders[-1][1]["forgets"] == [1]
    with pytest.raises(KeyError):
        group.other.perform(WorkerMessage("run", {"number": 1, "forgets": []}, memoryview(b"")))


def test_a_fault_of_the_request_is_raised_in_both():
    def refuse():
        raise InvalidRequest.at("text", "expected some")

    model, *_ = spread(lambda: refuse)
    with pytest.raises(InvalidRequest):
        prepared(model).run()


def test_an_order_is_not_interrupted_and_reads_its_long_texts_itself():
    """Another process does not know that the caller has left, or that a text is read beside the loop."""
    cancellation = Cancellation()
    cancellation.cancel()

    def work():
        checkpoint()
        return Answer(tokens=len(read_beside("text", 10**6, lambda: "read")))

    model, *_ = spread(lambda: work)
    with cancellable(cancellation), reading_beside(TextsRead()):
        assert prepared(model).run() == Answer(tokens=4)


class Ended(Exception):
    pass


@pytest.fixture
def group(monkeypatch):
    """A group of two whose other process the test plays: (group, sent, tell)."""

    def end(reason):
        raise Ended(reason)

    monkeypatch.setattr(device_group, "end_group", end)
    monkeypatch.setattr(device_group, "_APART_S", 0.3)
    monkeypatch.setattr(device_group, "_LOOK_S", 0)
    made = DeviceGroup.__new__(DeviceGroup)
    made._changed, made._faults, made._order, made._within = threading.Condition(), {}, 0, None
    sink = BytesIO()
    made._sinks = [sink]

    def tell(order, reason="same"):
        source = BytesIO(b"".join(bytes(each) for each in pieces_of("fault", {"order": order, "reason": reason})))
        made._listen(1, source)

    return made, sink, tell


def order(made, step=lambda _: 1):
    return made.order("run", {"number": 1, "forgets": []}, [b"body"], step)


def test_an_order_is_sent_with_its_number_before_it_is_carried_out(group):
    made, sink, _ = group

    def step(message):
        sink.seek(0)
        sent = read_message(sink)
        assert (sent.kind, sent.facts, bytes(sent.body)) == (message.kind, message.facts, b"body")
        return sent.facts["order"]

    assert order(made, step) == 1


def test_a_step_that_fails_here_and_there_is_a_fault_of_the_request(group):
    made, _, tell = group

    def fails(message):
        with pytest.raises(Ended, match="process of device 1 ended"):  # the end of what the test says
            tell(message.facts["order"])
        raise InvalidRequest.at("text", "expected some")

    with pytest.raises(InvalidRequest):
        order(made, fails)
    assert made._faults == {}
    assert order(made) == 1


def test_a_step_that_fails_here_alone_ends_the_group(group):
    made, *_ = group

    def fails(_):
        raise RuntimeError("out of memory")

    with pytest.raises(Ended, match=r"not on all others \(RuntimeError: out of memory"):
        order(made, fails)


def test_a_step_that_failed_there_alone_ends_the_group(group):
    made, _, tell = group

    def goes_on(message):
        with pytest.raises(Ended):
            tell(message.facts["order"], "MemoryError")

    with pytest.raises(Ended, match=r"device 1 alone \(MemoryError"):
        order(made, goes_on)


def test_a_fault_that_is_told_late_ends_the_group_at_once(group):
    made, _, tell = group
    order(made)
    with pytest.raises(Ended, match="device 1 alone"):
        tell(1)


def test_a_step_that_goes_on_long_after_it_failed_there_ends_the_group(group):
    made, *_ = group
    made._within, made._faults, made._told = 3, {2: {1: "told"}, 3: {1: "MemoryError"}}, 0.0
    with pytest.raises(Ended, match=r"device 1 alone \(MemoryError"):
        made._watch()


def test_the_end_of_a_process_ends_the_group(group):
    made, *_ = group
    with pytest.raises(Ended, match="the process of device 1 ended"):
        made._listen(1, BytesIO(struct.pack("<IQ", 100, 0)))
