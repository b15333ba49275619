"""The moderation client against a real server on this machine."""

import contextlib
import email.utils
import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evaluators.guards.moderation import MAX_CHARACTERS, ModerationClient
from jobspec.judging import ModerationJudge


class Service:
    """Answers as OpenAI's moderation does: harm where the text says so. `replies` come first."""

    def __init__(self):
        self.requests = []
        self.replies = deque()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                body = json.loads(raw)
                service.requests.append((self.path, dict(self.headers), body))
                reply = service.replies.popleft() if service.replies else service.usual
                # The client hangs up on what it does not want to read.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    reply(self, body)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def inputs(self):
        return [body["input"] for _, _, body in self.requests]

    @staticmethod
    def usual(handler, body):
        answer(200, {"results": [result(text) for text in body["input"]]})(handler, body)


def result(text):
    p = 0.9 if "harm" in text else 0.1
    scores = {"violence": p, "illicit": 0.7 * p, "hate": 0.01, "unknown": None}
    return {"flagged": p > 0.5, "category_scores": scores}


def answer(status, content, **headers):
    payload = content if isinstance(content, bytes) else json.dumps(content).encode()

    def reply(handler, body):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(payload)))
        handler.end_headers()
        handler.wfile.write(payload)

    return reply


@pytest.fixture
def service():
    running = Service()
    yield running
    running.stop()


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now, self.naps = 1000.0, []

    def sleep(self, seconds):
        self.naps.append(seconds)
        self.now += seconds

    def __call__(self):
        return self.now


@pytest.fixture
def make_client(service):
    def make(key=None, **options):
        values = {"url": service.url, "requests_per_minute": 60_000, **options}
        clock = Clock()
        client = ModerationClient(ModerationJudge(**values), key, sleep=clock.sleep, clock=clock)
        return client, clock

    return make


def statuses(judgements):
    return [one.status for one in judgements]


def test_the_largest_category_score_is_p_harmful(make_client, service):
    client, _ = make_client(batch_size=2, model="moderation-x")
    found = client.judge(["p"] * 3, ["harm", "fine", "more harm"])
    assert [one.p_harmful for one in found] == [0.9, 0.1, 0.9]
    assert [one.categories for one in found] == [
        ("illicit", "violence"),
        (),
        ("illicit", "violence"),
    ]
    assert service.inputs == [["harm", "fine"], ["more harm"]]
    assert [(path, body["model"]) for path, _, body in service.requests] == [
        ("/v1/moderations", "moderation-x")
    ] * 2


def test_results_do_not_depend_on_the_batch_size(make_client):
    answers = ["harm", "fine", "x", "äöü 漢字 🙂", "\ud800"] * 2
    found = [make_client(batch_size=size)[0].judge(["p"] * 10, answers) for size in (1, 3, 16)]
    assert found[0] == found[1] == found[2]


def test_prompts_stay_here(make_client, service):
    make_client()[0].judge(["a secret prompt"], ["fine"])
    assert "secret" not in json.dumps([body for _, _, body in service.requests])


def test_the_key_is_sent_and_never_shown(make_client, service):
    service.replies.append(answer(401, {"error": "bad key sk-secret"}))
    client, _ = make_client(key="sk-secret\n")
    found = client.judge(["p"], ["fine"])[0]
    assert service.requests[0][1]["Authorization"] == "Bearer sk-secret"
    assert (found.status, found.reason) == ("failed", "HTTP 401")
    assert "secret" not in json.dumps(dict(client.card)) + client.id + client.fingerprint


def test_without_a_key_no_authorization_is_sent(make_client, service):
    make_client()[0].judge(["p"], ["fine"])
    assert "Authorization" not in service.requests[0][1]


def test_a_key_with_a_line_break_is_refused(make_client):
    with pytest.raises(ValueError, match="TUNEGATE_MODERATION_KEY"):
        make_client(key="one\ntwo")


def test_transient_failures_are_tried_again_after_longer_and_longer_waits(make_client, service):
    service.replies.extend(answer(status, b"") for status in (500, 503, 429))
    client, clock = make_client(retries=3)
    assert client.judge(["p"], ["harm"])[0].p_harmful == 0.9
    assert clock.naps == [0.5, 1.0, 2.0]
    assert client.requests == 4


def test_retry_after_in_seconds_is_obeyed_up_to_five_minutes(make_client, service):
    service.replies.append(answer(429, b"", Retry_After="7"))
    service.replies.append(answer(429, b"", Retry_After="86400"))
    service.replies.append(answer(429, b"", Retry_After="soon"))
    client, clock = make_client(retries=3)
    assert client.judge(["p"], ["fine"])[0].status == "judged"
    assert clock.naps == [7.0, 300.0, 2.0]


def test_retry_after_may_be_a_date(make_client, service):
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    service.replies.append(answer(503, b"", Retry_After=date))
    client, clock = make_client()
    client.judge(["p"], ["fine"])
    assert 90 < clock.naps[0] <= 100


def test_after_the_last_try_the_answers_are_failed_with_the_reason(make_client, service):
    service.replies.extend([answer(503, b"")] * 3)
    client, clock = make_client(retries=2)
    found = client.judge(["p", "p"], ["harm", "fine"])
    assert statuses(found) == ["failed", "failed"]
    assert {one.reason for one in found} == {"HTTP 503 after 3 tries"}
    assert [one.p_harmful for one in found] == [None, None]
    # No sleep after the last try.
    assert clock.naps == [0.5, 1.0]


def test_a_service_that_is_down_is_not_asked_again_and_again(make_client, service):
    service.replies.extend([answer(503, b"")] * 100)
    client, _ = make_client(retries=1, batch_size=1)
    found = client.judge(["p"] * 20, ["fine"] * 20)
    assert statuses(found) == ["failed"] * 20
    assert client.requests == 6
    assert found[-1].reason == (
        "not asked, because the last requests failed: HTTP 503 after 2 tries"
    )


def test_nobody_listening_is_a_failure(make_client):
    probe = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = probe.server_address[1]
    probe.server_close()
    client, _ = make_client(url=f"http://127.0.0.1:{port}", retries=1)
    found = client.judge(["p"], ["fine"])[0]
    assert (found.status, found.reason) == (
        "failed",
        "no reply (ConnectionRefusedError) after 2 tries",
    )


def test_a_reply_that_takes_too_long_is_tried_again(make_client, service):
    done = threading.Event()

    def slow(handler, body):
        done.wait(5)
        service.usual(handler, body)

    service.replies.append(slow)
    client, _ = make_client(timeout_seconds=0.2, retries=1)
    try:
        found = client.judge(["p"], ["harm"])[0]
    finally:
        done.set()
    assert (found.p_harmful, client.requests) == (0.9, 2)


def test_a_reply_that_trickles_in_is_held_to_the_same_limit(make_client, service):
    stop = threading.Event()

    def trickle(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while not stop.wait(0.05):
            handler.wfile.write(b" ")

    service.replies.append(trickle)
    client, _ = make_client(timeout_seconds=0.3, retries=0)
    try:
        found = client.judge(["p"], ["harm"])[0]
    finally:
        stop.set()
    assert (found.status, found.reason) == ("failed", "timed out after 1 try")


def test_a_reply_that_breaks_off_is_tried_again(make_client, service):
    def cut(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"results": [')
        handler.close_connection = True

    service.replies.append(cut)
    client, _ = make_client(retries=1)
    assert client.judge(["p"], ["harm"])[0].p_harmful == 0.9
    assert client.requests == 2


def test_a_redirect_is_not_followed(make_client, service):
    service.replies.append(answer(302, b"", Location="http://192.0.2.1/v1/moderations"))
    found = make_client()[0].judge(["p"], ["fine"])[0]
    assert (found.status, found.reason) == ("failed", "HTTP 302")


def test_only_the_refused_input_of_a_batch_fails(make_client, service):
    def picky(handler, body):
        if any("bad" in text for text in body["input"]):
            answer(400, {"error": "input"})(handler, body)
        else:
            service.usual(handler, body)

    service.replies.extend([picky] * 20)
    client, _ = make_client(batch_size=8)
    found = client.judge(["p"] * 8, ["fine", "harm", "bad", "fine", "fine", "fine", "harm", "fine"])
    assert statuses(found) == ["judged"] * 2 + ["failed"] + ["judged"] * 5
    assert found[2].reason == "HTTP 400"
    assert client.requests <= 7


def test_requests_keep_their_distance(make_client, service):
    client, clock = make_client(requests_per_minute=30, batch_size=1)
    client.judge(["p"] * 3, ["one", "two", "three"])
    assert clock.naps == [2.0, 2.0]


def test_beyond_the_cap_nothing_is_sent_and_answers_are_failed(make_client, service):
    client, _ = make_client(max_requests=2, batch_size=1)
    found = client.judge(["p"] * 4, ["fine"] * 4)
    assert statuses(found) == ["judged", "judged", "failed", "failed"]
    assert "the cap of 2 requests is reached" in found[2].reason
    assert statuses(client.judge(["p"], ["fine"])) == ["failed"]
    assert len(service.requests) == client.requests == 2


def test_tries_count_towards_the_cap(make_client, service):
    service.replies.extend([answer(500, b"")] * 10)
    client, _ = make_client(max_requests=2, retries=5)
    found = client.judge(["p"], ["fine"])[0]
    assert (found.status, len(service.requests)) == ("failed", 2)
    assert found.reason == "the cap of 2 requests is reached, last: HTTP 500"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>not found</html>",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"null",
        b"[]",
        b"{}",
        b'{"results": {}}',
        b'{"results": []}',
        b'{"results": [{}]}',
        b'{"results": [null]}',
        b'{"results": [{"flagged": true}]}',
        b'{"results": [{"category_scores": {}}]}',
        b'{"results": [{"category_scores": {"violence": null}}]}',
        b'{"results": [{"category_scores": [0.5]}]}',
        b'{"results": [{"category_scores": {"violence": "0.5"}}]}',
        b'{"results": [{"category_scores": {"violence": true}}]}',
        b'{"results": [{"category_scores": {"violence": NaN}}]}',
        b'{"results": [{"category_scores": {"violence": Infinity}}]}',
        b'{"results": [{"category_scores": {"violence": 1.01}}]}',
        b'{"results": [{"category_scores": {"violence": -0.5, "hate": 0.2}}]}',
        b'{"results": [{"category_scores": {"a": 0.5}}, {"category_scores": {"a": 0.5}}]}',
    ],
)
def test_an_answer_that_says_nothing_usable_is_unparsable(body, make_client, service):
    service.replies.append(answer(200, body))
    client, _ = make_client(retries=0)
    found = client.judge(["p"], ["fine"])[0]
    assert (found.status, found.p_harmful, client.requests) == ("unparsable", None, 1)


def test_one_bad_result_does_not_spoil_the_others(make_client, service):
    bad = {"results": [result("harm"), {"category_scores": {"hate": 2}}, result("fine")]}
    service.replies.append(answer(200, bad))
    found = make_client()[0].judge(["p"] * 3, ["a", "b", "c"])
    assert [one.p_harmful for one in found] == [0.9, None, 0.1]


def test_an_endless_reply_is_not_read_to_its_end(make_client, service):
    def endless(handler, body):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * (1 << 20))

    service.replies.append(endless)
    client, _ = make_client(retries=0)
    found = client.judge(["p"], ["fine"])[0]
    assert (found.status, found.reason.startswith("a reply of more than")) == ("failed", True)


def test_long_answers_are_cut_and_marked(make_client, service):
    client, _ = make_client()
    found = client.judge(["p", "p"], ["x" * 1_000_000 + "harm", "harm"])
    assert [(one.p_harmful, one.input_truncated) for one in found] == [(0.1, True), (0.9, False)]
    assert [len(text) for text in service.inputs[0]] == [MAX_CHARACTERS, 4]


def test_empty_answers_are_not_sent(make_client, service):
    found = make_client()[0].judge(["p"] * 3, ["", "harm", " \n"])
    assert statuses(found) == ["failed", "judged", "failed"]
    assert service.inputs == [["harm"]]


def test_the_report_names_the_host_that_was_contacted(make_client, service):
    assert make_client()[0].hosts == (f"127.0.0.1:{service.port}",)
    client, _ = make_client(url="https://user:secret@moderation.example/v1")
    assert client.hosts == ("moderation.example",)
    assert "secret" not in client.id


def test_the_fingerprint_names_address_model_and_threshold(make_client, service):
    clients = [
        make_client()[0],
        make_client(model="another")[0],
        make_client(threshold=0.3)[0],
        make_client(url=f"{service.url}/other")[0],
    ]
    assert len({client.fingerprint for client in clients}) == 4
    assert make_client(batch_size=1)[0].fingerprint == clients[0].fingerprint


def test_prompts_and_answers_must_pair_up(make_client):
    with pytest.raises(ValueError, match="1 prompts but 2 responses"):
        make_client()[0].judge(["p"], ["a", "b"])
