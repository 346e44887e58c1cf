"""The loop of a model's process: which requests a turn takes, and with whom a pass is shared."""

import gc
import weakref
from contextlib import contextmanager
from queue import Empty
from threading import Event
from unittest.mock import Mock

import pytest

from attention_contract.schemas.models import ModelList
from attention_contract.wire import JSON
from attention_service.core.cancellation import Cancellation, checkpoint
from attention_service.models.inputs.long_texts import read_beside
from attention_service.models.process import turns as process_turns
from attention_service.models.process.served import Answer, PricedRun
from attention_service.models.process.turns import Turns
from attention_service.models.worker_messages import WorkerMessage


class Pipes:
    """The messages of a test. ``later`` come one by one, each within a moment of the one before.

    ``awaits``: True while a thread beside the loop has a message to post.
    """

    awaits = False

    def __init__(self, *messages):
        self.now, self.later, self.sent = list(messages), [], []
        self.cancellations = {}
        self.posted = Event()
        self.admits = ()
        """Requests that are admitted as soon as they are priced."""

    def arrived(self, *, wait_s):
        if wait_s is None and not self.now and not (self.awaits and self.posted.wait(10)):
            raise Empty  # the test is over
        self.posted.clear()
        found, self.now = self.now, []
        return found or ([self.later.pop(0)] if wait_s and self.later else [])

    def post(self, message):
        self.now.append(message)
        self.posted.set()

    def cancellation(self, number):
        return self.cancellations.setdefault(number, Cancellation(None))

    def send(self, kind, facts=None, body=(), *, request=None):
        self.sent.append((kind, request))
        if kind == "need" and request in self.admits:
            self.now.append(go(request))


class Generation:
    """A generation of some tokens."""

    has_ended = False

    def __init__(self, unread=0, most=2):
        self.tokens, self.unread, self.most = 0, unread, most

    def leave(self):
        pass


class Model:
    """Questions are of group ``alike``, and generations take two turns."""

    def __init__(self, *, fails=False):
        self.passes, self.spares, self.fails, self.finished = [], [], fails, 0
        self.in_a_pass = lambda number: None

    def held_bytes(self):
        return None

    def adapter_bytes(self):
        return {}

    def recover(self, fault):
        pass

    def prepare(self, operation, body, facts, emit):
        if operation.startswith("chat"):  # of so many tokens, or two
            most = int(operation.removeprefix("chat") or 2)
            return PricedRun(10, lambda: Generation(most=most), generates=True)

        if operation.startswith("read"):  # a prompt of so many tokens
            unread = int(operation.split()[1])
            return PricedRun(10, lambda: Generation(unread), unread / 100, generates=True)

        if operation == "long":  # a request with a long text
            text = read_beside("text", 10**6, self.read_text)
            return PricedRun(10, lambda: Answer(ModelList(data=[])) if text else None)

        if operation == "effects":  # a sweep of many passes

            def parts():
                for _ in range(5):
                    self.passes.append("effects")
                    self.in_a_pass(len(self.passes))
                    checkpoint()
                    self.finished += 1
                    yield 0.0
                return Answer(ModelList(data=[]))

            return PricedRun(10, parts)

        def alone():
            self.passes.append(1)
            return Answer(ModelList(data=[]))

        return PricedRun(10, alone, group=operation, length=4, question=operation)

    @contextmanager
    def turn(self, *, spares_core):
        self.spares.append(spares_core)
        yield

    def answer_joined(self, questions):
        if self.fails:
            raise RuntimeError("one of them is at fault")
        self.passes.append(len(questions))
        return [Answer(ModelList(data=[])) for _ in questions]

    def read(self, running, most):
        for each in running:
            part = min(most, each.unread)
            each.unread, most = each.unread - part, most - part
        return {}

    def step(self, running):
        read = [each for each in running if not each.unread]
        self.passes.append(len(read))
        for each in read:
            each.tokens += 1
            each.has_ended = each.tokens == each.most
        return {}

    def finish(self, running):
        return Answer(last=[], tokens=running.tokens)


def ask(number, operation, caller="a", **more):
    facts = {"operation": operation, "free_bytes": 99, "memory": None, "form": JSON, "encoding": "list"}
    facts |= {"caller": caller, **more}
    return WorkerMessage("ask", {"request": number, **facts}, memoryview(b""))


def go(number):
    return WorkerMessage("go", {"request": number, "queue_ms": 0.0, "load_ms": 0.0, "owner": None}, memoryview(b""))


def turns(pipes, model):
    """The loop by a clock that stands: each part takes as long as another."""
    return Turns(pipes, model, [], clock=lambda: 0.0)


def run(pipes):
    """Run until there is nothing more to do. Returns the sizes of the passes."""
    model = Model()
    with pytest.raises(Empty):
        turns(pipes, model).run()
    return model.passes


def test_requests_that_come_at_once_share_a_pass_although_they_are_admitted_one_after_the_other():
    pipes = Pipes(*[ask(number, "weights") for number in range(4)], go(0))
    pipes.later = [go(1), go(2), go(3)]
    assert run(pipes) == [4]
    assert [kind for kind, _ in pipes.sent].count("reply") == 4


def test_a_pass_waits_for_nobody_who_cannot_share_it():
    pipes = Pipes(ask(0, "weights"), ask(1, "forward"), go(0))
    pipes.later = [go(1)]
    with pytest.raises(Empty):
        turns(pipes, model := Model()).run()
    assert model.passes == [1]
    assert pipes.later


@pytest.mark.parametrize(
    ("reads", "alone", "spares"), [(True, True, False), (True, False, True), (False, False, False)]
)
def test_a_turn_spares_the_core_of_a_text_that_is_read_unless_a_request_is_alone(reads, alone, spares):
    loop = Turns(Pipes(ask(0, "weights"), go(0), ask(1, "chat", alone=alone), go(1)), model := Model(), [])
    loop._texts.reads = reads
    with pytest.raises(Empty):
        loop.run()
    assert {*model.spares} == {spares}


def test_a_request_that_is_not_admitted_holds_up_no_pass():
    assert run(Pipes(ask(0, "weights"), ask(1, "weights"), go(0))) == [1]


def test_generations_that_are_ready_begin_in_one_turn():
    messages = [each for number in range(3) for each in (ask(number, "chat"), go(number))]
    assert run(Pipes(*messages)) == [3, 3]


def test_nobody_waits_for_mates_beside_texts_that_run():
    pipes = Pipes(ask(0, "chat"), go(0), ask(1, "weights"), ask(2, "weights"), go(1))
    pipes.later = [go(2)]
    assert run(pipes)[:2] == [1, 1]


def test_a_shared_pass_that_fails_runs_each_alone():
    messages = [each for number in range(3) for each in (ask(number, "weights"), go(number))]
    pipes, model = Pipes(*messages), Model(fails=True)
    with pytest.raises(Empty):
        turns(pipes, model).run()
    assert model.passes == [1, 1, 1]
    assert [request for kind, request in pipes.sent if kind == "reply"] == [0, 1, 2]


def ended(*messages):
    """The requests in the order of their ends, and what was sent."""
    run(pipes := Pipes(*messages))
    return [request for kind, request in pipes.sent if kind == "done"], pipes.sent


def test_callers_are_answered_in_turn_however_many_requests_one_of_them_has():
    messages = [each for number in range(5) for each in (ask(number, f"own {number}"), go(number))]
    messages += [each for number in (5, 6) for each in (ask(number, f"own {number}", "b"), go(number))]
    assert ended(*messages)[0] == [0, 5, 1, 6, 2, 3, 4]


def test_a_short_prompt_waits_for_no_long_ones_of_another_caller():
    messages = [each for number in range(3) for each in (ask(number, "read 3000"), go(number))]
    done, sent = ended(*messages, ask(3, "read 20", "b"), go(3))
    assert done == [3, 0, 1, 2]
    assert sent.index(("done", 3)) < len(sent) - 6
    assert ("pass", None) in sent  # a part of a long prompt may take as long as all of it


def test_prompts_that_end_with_their_first_token_count_for_their_caller():
    messages = [each for number in range(6) for each in (ask(number, "read 500"), go(number))]
    done, _ = ended(*messages, *(each for number in (6, 7) for each in (ask(number, "read 500", "b"), go(number))))
    assert sorted(done[:4]) == [0, 1, 6, 7]


def test_a_request_that_was_admitted_leaves_at_once():
    pipes, model = Pipes(ask(0, "effects"), go(0), ask(1, "weights", "b"), ask(2, "forward", "b")), Model()

    def in_a_pass(_):
        pipes.now = (
            [go(1), go(2), WorkerMessage("cancel", {"request": 2}, memoryview(b""))] if len(model.passes) == 1 else []
        )

    model.in_a_pass = in_a_pass
    with pytest.raises(Empty):
        turns(pipes, model).run()
    assert pipes.sent.index(("done", 2)) < pipes.sent.index(("reply", 1))


@pytest.mark.parametrize("within", [True, False], ids=["in a pass", "between passes"])
def test_a_sweep_that_is_cancelled_begins_no_further_pass(within):
    pipes, model = Pipes(ask(0, "effects"), go(0), ask(1, "weights")), Model()

    def in_a_pass(number):
        if number == 3:
            pipes.cancellations[0].cancelled = within
            pipes.now = [WorkerMessage("leave", {"request": 0}, memoryview(b"")), go(1)]

    model.in_a_pass = in_a_pass
    with pytest.raises(Empty):
        turns(pipes, model).run()
    assert (model.passes, model.finished) == (["effects"] * 3 + [1], 2 + (not within))
    assert pipes.sent.count(("problem", 0)) == pipes.sent.count(("done", 0)) == 1
    assert ("reply", 1) in pipes.sent


def beside_parts(*messages):
    """The passes of questions in parts of a caller, and what another caller gets meanwhile."""
    long_ones = [each for number in range(3) for each in (ask(number, "effects"), go(number))]
    pipes, model = Pipes(*long_ones, *messages), Model()
    with pytest.raises(Empty):
        turns(pipes, model).run()
    return model.passes, pipes.sent


@pytest.mark.parametrize("operation", ["weights", "chat", "read 2000"])
def test_nobody_waits_for_more_than_one_part_of_another_callers_question(operation):
    passes, sent = beside_parts(ask(9, operation, "b"), go(9))
    done = [number for kind, number in sent if kind == "done"]
    assert done[0] == 9
    ends = len(passes) if operation == "weights" else max(at for at, each in enumerate(passes) if each == 1) + 1
    own = [at for at, each in enumerate(passes[:ends]) if each != "effects"]
    assert all(later - before <= 2 for before, later in zip([-1, *own], own, strict=False))


def test_callers_get_the_same_time_however_long_their_parts_are():
    pipes, model = Pipes(ask(0, "effects"), go(0)), Model()
    pipes.now += [each for number in range(1, 31) for each in (ask(number, f"weights {number}", "b"), go(number))]

    def clock():
        return sum(0.1 if each == "effects" else 0.01 for each in model.passes)

    with pytest.raises(Empty):
        Turns(pipes, model, [], clock).run()
    parts = [at for at, each in enumerate(model.passes) if each == "effects"]
    assert parts[0] == 0
    assert parts[2] - parts[1] in range(9, 13)  # ten short questions take as long as a part


def test_a_texts_tokens_take_as_much_time_as_anothers_parts():
    pipes, model = Pipes(ask(0, "effects"), go(0), ask(1, "chat 10", "b"), go(1)), Model()

    def clock():
        return sum(1.0 if each == "effects" else 0.5 for each in model.passes)

    with pytest.raises(Empty):
        Turns(pipes, model, [], clock).run()
    assert model.passes == ["effects", 1, 1] * 5


def test_a_short_question_waits_for_no_long_one_of_its_own_caller():
    messages = [each for number in range(3) for each in (ask(number, "effects"), go(number))]
    done, _ = ended(*messages, ask(3, "weights"), go(3))
    assert done == [3, 0, 1, 2]


def test_a_long_text_is_read_beside_the_loop_which_goes_on_meanwhile():
    text = WorkerMessage("ask", ask(0, "long").facts, memoryview(b" " * 20_000))
    pipes, model, went_on = Pipes(text, ask(1, "effects", "b"), go(1)), Model(), Event()
    pipes.admits, pipes.awaits = [0], True

    def read():
        assert went_on.wait(10)
        return "text"

    def in_a_pass(number):
        if number == 3:
            went_on.set()

    model.read_text, model.in_a_pass = read, in_a_pass

    def arrived(*, wait_s, former=pipes.arrived):
        pipes.awaits = pipes.awaits and ("need", 0) not in pipes.sent
        return former(wait_s=wait_s)

    pipes.arrived = arrived
    with pytest.raises(Empty):
        turns(pipes, model).run()
    assert went_on.is_set()
    assert {("reply", 0), ("reply", 1)} <= {*pipes.sent}
    assert True in model.spares  # a core less for the passes meanwhile


def test_what_a_load_leaves_is_looked_through_by_no_later_collection(monkeypatch):
    """A full collection goes through all tracked objects, of which a model and its modules have half a million."""
    garbage = []

    class Pipes:
        next = staticmethod(iter([WorkerMessage("load", {"memories": []}, memoryview(b""))]).__next__)
        take_over = classmethod(lambda cls: cls())
        send = Mock()

    def load(*_):
        model, lost = Mock(), Mock()
        lost.itself = lost
        garbage.append(weakref.ref(lost))
        model.info.return_value, model.held_bytes.return_value = {}, None
        models.append(model)
        return model

    models = []
    monkeypatch.setattr(process_turns, "ProcessPipes", Pipes)
    monkeypatch.setattr(process_turns.Turns, "run", lambda _: None)
    monkeypatch.setattr(process_turns, "keep_freed_memory", lambda: None)
    try:
        process_turns.serve(load)
        assert garbage[0]() is None
        assert not any(each is models[0] for each in gc.get_objects())
    finally:
        gc.unfreeze()
