"""Fetching pages: what is read, what is refused, and that no trick leads to an address that is not public."""

import asyncio
import ipaddress
import socket
import ssl
import zlib

import brotli
import pytest
from loopback_server import LoopbackServer, Reply

from arpo_trl.tools.calling import parameters_of
from arpo_trl.tools.contract import InfrastructureError, ToolCall, ToolContext, ToolError
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.runner import ToolRunner
from arpo_trl.tools.search import addresses
from arpo_trl.tools.search.addresses import is_public
from arpo_trl.tools.search.fetch import FetchPage
from arpo_trl.tools.search.pages import PageReader, excerpt


ARTICLE = "<html><head><title>T</title><script>evil()</script></head><body><nav>Menu</nav><article><h1>Bern</h1>{}"
ARTICLE += "</article><footer>Imprint</footer></body></html>"
TEXT = "Bern is the capital of Switzerland, on the river Aare. " * 10
PAGE = ARTICLE.format(f"<p>{TEXT}</p>")


def read(url, **options):
    return asyncio.run(PageReader(**{"allow_private_addresses": True, **options}).read(url))


def refusal(url, **options):
    with pytest.raises(ToolError) as error:
        read(url, **options)
    return str(error.value)


def test_what_a_person_would_read():
    with LoopbackServer([PAGE]) as server:
        text = read(server.url)
    assert TEXT.strip() in text and not any(word in text for word in ("evil", "Menu", "Imprint", "<"))


def test_plain_text_and_character_sets():
    replies = [
        Reply("Zürich\n\nGenève".encode("latin-1"), headers={"Content-Type": "text/plain; charset=latin-1"}),
        Reply("Zürich".encode(), headers={"Content-Type": "text/markdown; charset=of-no-kind"}),
        Reply(PAGE.replace("Aare", "Äare").encode("latin-1"), headers={"Content-Type": "text/html;charset=latin-1"}),
    ]
    with LoopbackServer(replies) as server:
        assert read(server.url) == "Zürich\n\nGenève"
        assert read(server.url) == "Zürich"
        assert "river Äare" in read(server.url)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(b"%PDF", headers={"Content-Type": "application/pdf"}), "of type application/pdf"),
        (Reply(b"x", headers={"Content-Type": ""}), "of type unknown"),
        (Reply("no", 404), "answered 404 Not Found"),
        (Reply("no", 503), "answered 503"),
        ("<html><body></body></html>", "no readable text"),
        (Reply(brotli.compress(b"x"), headers={"Content-Type": "text/html", "Content-Encoding": "br"}), "packed"),
        (Reply(b"no gzip", headers={"Content-Type": "text/plain", "Content-Encoding": "gzip"}), "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said_to_the_model(reply, said):
    with LoopbackServer([reply]) as server:
        assert said in refusal(server.url)


@pytest.mark.parametrize("url", ["", "page", "ftp://x.test/a", "file:///etc/passwd", "http://", "http://a:b@x.test/"])
def test_addresses_that_are_none(url):
    assert "begins with http" in refusal(url)


def test_a_host_that_does_not_exist_and_one_that_does_not_answer():
    assert "cannot be resolved" in refusal("http://no-such-host.invalid/")
    with LoopbackServer([PAGE]) as server:
        pass
    assert "cannot be read" in refusal(server.url)


def packed(content):
    """An endless gzip stream of `content` over and over: its beginning, and the block to repeat."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    head = compressor.compress(content) + compressor.flush(zlib.Z_FULL_FLUSH)
    return head, compressor.compress(content) + compressor.flush(zlib.Z_FULL_FLUSH)


def test_of_a_page_without_end_the_beginning_is_read():
    head, block = packed(b"x" * 1_000_000)
    replies = [
        Reply(endless=b"x" * 10_000, headers={"Content-Type": "text/plain"}),
        Reply(head, endless=block, headers={"Content-Type": "text/plain", "Content-Encoding": "gzip"}),
    ]
    with LoopbackServer(replies) as server:
        assert [read(server.url, max_bytes=30_000) for _ in replies] == ["x" * 30_000] * 2


@pytest.mark.parametrize("reply", [Reply(hangs=True), Reply("<p>" * 500, drips=True)])
def test_a_page_that_takes_too_long_is_given_up(reply):
    with LoopbackServer([reply]) as server:
        assert "took longer than 0.3 s" in refusal(server.url, timeout_s=0.3)


def test_redirects_are_followed_and_counted():
    def answer(asked):
        number = int(asked.path.strip("/"))
        return PAGE if number == 0 else Reply(b"", 302, {"Location": f"/{number - 1}"})

    with LoopbackServer(answer) as server:
        assert TEXT.strip() in read(f"{server.url}/5")
        assert "cannot be read" in refusal(f"{server.url}/6")


def test_redirects_to_other_schemes_are_not_followed():
    with LoopbackServer([Reply(b"", 302, {"Location": "file:///etc/passwd"})]) as server:
        assert "cannot be read" in refusal(server.url)


def test_cookies_of_one_page_do_not_reach_the_next():
    with LoopbackServer([Reply(PAGE, headers={"Set-Cookie": "who=me"})]) as server:
        reader = PageReader(allow_private_addresses=True)
        for _ in range(2):
            asyncio.run(reader.read(server.url))
        assert ["Cookie" in asked.headers for asked in server.asked] == [False, False]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",  # shared by a provider's customers; metadata of Alibaba's cloud
        "169.254.169.254",  # metadata of most clouds
        "168.63.129.16",  # Azure's
        "192.0.2.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",  # metadata of Amazon's cloud
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "2002:7f00:1::",  # 6to4 to 127.0.0.1
        "64:ff9b::a9fe:a9fe",  # NAT64 to 169.254.169.254
        "2001:0:7f00:1::1",  # Teredo with a private server
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0"],
)
def test_no_spelling_of_this_machine_is_reached(host):
    with LoopbackServer([PAGE]) as server:
        said = refusal(f"http://{host}:{server.port}/", allow_private_addresses=False)
    assert ("not a public address" in said or "Invalid IPv4" in said) and server.asked == []


PUBLIC, PRIVATE = "127.0.0.1", "127.0.0.2"  # as the tests below see them


@pytest.fixture
def names(monkeypatch):
    """Names and the addresses they resolve to, one list for every time they are asked for; the last one stays."""
    table, resolve = {}, socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        if host not in table:
            ipaddress.ip_address(host)  # nothing but addresses goes further
            return resolve(host, port, *args, **kwargs)
        answers = table[host]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0)) for address in answer]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "is_public", lambda address: address == PUBLIC)
    return table


def test_the_name_is_not_asked_again_after_its_address_was_checked(names):
    with LoopbackServer([PAGE]) as public, LoopbackServer([PAGE], PRIVATE, port=public.port) as private:
        names["rebind.test"] = [[PUBLIC], [PRIVATE]]
        assert TEXT.strip() in read(f"http://rebind.test:{public.port}/a?b=1", allow_private_addresses=False)
    assert private.asked == []
    (asked,) = public.asked
    assert (asked.path, asked.params, asked.headers["Host"]) == ("/a", {"b": "1"}, f"rebind.test:{public.port}")


def test_every_redirect_is_checked(names):
    names["there.test"], names["inside.test"] = [[PUBLIC]], [[PRIVATE]]
    with LoopbackServer([PAGE], PRIVATE) as private:
        for target in (private.url, f"http://inside.test:{private.port}/", f"//inside.test:{private.port}/"):
            with LoopbackServer([Reply(b"", 307, {"Location": target})]) as public:
                said = refusal(f"http://there.test:{public.port}/", allow_private_addresses=False)
            assert "not a public address" in said and len(public.asked) == 1
    assert private.asked == []


def test_a_redirect_to_the_same_name_is_resolved_and_checked_anew(names):
    names["rebind.test"] = [[PUBLIC], [PRIVATE]]
    with LoopbackServer([Reply(b"", 302, {"Location": "/b"})]) as public:
        assert "not a public" in refusal(f"http://rebind.test:{public.port}/", allow_private_addresses=False)
    assert [asked.path for asked in public.asked] == ["/"]


def test_one_private_address_among_several_is_refused(names):
    names["both.test"] = [[PUBLIC, PRIVATE]]
    with LoopbackServer([PAGE]) as public:
        assert "not a public" in refusal(f"http://both.test:{public.port}/", allow_private_addresses=False)
    assert public.asked == []


def test_the_next_address_is_tried_where_one_does_not_answer(names):
    names["two.test"] = [["127.0.0.9", PUBLIC]]
    with LoopbackServer([PAGE]) as server:
        assert TEXT.strip() in read(f"http://two.test:{server.port}/")


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    with LoopbackServer([PAGE]) as proxy, LoopbackServer([PAGE]) as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        read(server.url)
    assert proxy.asked == [] and len(server.asked) == 1


def certificate(name, folder):
    """A certificate for `name` that vouches for itself, and its key, in one file."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    path = folder / "certificate.pem"
    path.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + signed.public_bytes(pem)
    )
    return str(path)


def test_certificates_are_checked_against_the_name_though_the_address_is_dialled(names, monkeypatch, tmp_path):
    path = certificate("secure.test", tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(path)
    asked_for = []
    tls.sni_callback = lambda socket, name, context: asked_for.append(name)
    monkeypatch.setattr(addresses, "_TLS", ssl.create_default_context(cafile=path))
    names["secure.test"] = names["other.test"] = [[PUBLIC]]
    with LoopbackServer([PAGE], tls=tls) as server:
        assert TEXT.strip() in read(f"https://secure.test:{server.port}/", allow_private_addresses=False)
        said = refusal(f"https://other.test:{server.port}/", allow_private_addresses=False)
    assert asked_for == ["secure.test", "other.test"] and "certificate" in said.lower()
    assert len(server.asked) == 1


def test_the_part_of_a_page_that_was_looked_for():
    lines = [f"line {n} about nothing much at all" for n in range(100)]
    lines[60] = "the bears of Bern live here"
    text = "\n".join(lines)
    part = excerpt(text, "Where do bears live?", 200)
    assert lines[60] in part and len(part) <= 200 and lines[59] in part and lines[61] in part
    assert excerpt(text, "unrelated words", 200) == text[:200]
    assert excerpt("short", "anything", 200) == "short"
    assert len(excerpt("x" * 1000, "anything", 200)) == 200
    assert len(excerpt("\n" * 1000, "anything", 200)) <= 200


def fetch(url, query="capital", options=None, context=None):
    tools = resolve_tools([{"name": "fetch_page", "arguments": options or {}, "max_retries": 0}])
    with ToolRunner(tools.tools, tools.options) as runner:
        runner.start("turn", [ToolCall("fetch_page", {"url": url, "query": query})], context=context)
        [(_, [result])] = runner.poll(30)
    return result


ALLOWED = {"pages": {"allow_private_addresses": True}}


def test_the_tool_reads_a_page():
    with LoopbackServer([PAGE]) as server:
        assert TEXT.strip() in fetch(f" {server.url} ", options=ALLOWED).content
        short = fetch(server.url, options={**ALLOWED, "max_page_chars": 100})
        assert len(short.content) <= 100 and short.failure is None


def test_a_page_that_does_not_answer_does_not_void_the_row():
    assert fetch("http://127.0.0.1:1/").failure == "tool_error"
    assert fetch("http://127.0.0.1:1/", options=ALLOWED).failure == "tool_error"


def test_the_tool_has_a_page_summed_up():
    reply = {"choices": [{"message": {"content": "Bern."}}]}
    with LoopbackServer([PAGE]) as server, LoopbackServer([reply]) as model:
        options = {**ALLOWED, "summariser": {"model": "m", "base_url": model.url}}
        result = fetch(server.url, "capital", options, ToolContext("0/0", 0, 0, question="What is the capital?"))
    assert result.content == "Bern."
    prompt = model.asked[0].json["messages"][0]["content"]
    assert (
        "[question]\nWhat is the capital?\n" in prompt
        and "[search query]\ncapital\n" in prompt
        and TEXT[:50] in prompt
    )


def test_without_a_query_the_question_stands_for_it(tmp_path):
    page = ARTICLE.format("<p>Nothing of interest stands here.</p>" * 100 + "<p>Bears live in a pit.</p>")
    options = {**ALLOWED, "max_page_chars": 200}
    with LoopbackServer([page]) as server:
        asks = [ToolContext("0/0", 0, 0, question=question) for question in ("Where do bears live?", "Who wrote it?")]
        answers = [fetch(server.url, "", options, context).content for context in asks]
    assert ["a pit" in answer for answer in answers] == [True, False]
    tool = FetchPage(**options)
    keys = [
        tool.normalise_arguments({"url": "u", "query": query, "context": context})
        for query in ("", "q")
        for context in asks
    ]
    assert keys[0] != keys[1] and keys[2] == keys[3]


def test_the_tagged_dialect_passes_the_address():
    assert parameters_of(FetchPage().fetch_page).required == ("url",)


def test_c08_preflight_fetches_a_page():
    with LoopbackServer([PAGE, Reply("no", 500)]) as server:
        tools = resolve_tools([{"name": "fetch_page", "arguments": {**ALLOWED, "preflight_url": server.url}}])
        tools.preflight()
        with pytest.raises(InfrastructureError, match="fetch_page: .*answered 500"):
            tools.preflight()
