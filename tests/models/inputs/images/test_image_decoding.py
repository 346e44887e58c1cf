"""Images are refused by their headers before anything is decoded, and what is broken is named."""

import base64
import contextlib
import io
import struct
import threading
import tracemalloc
import zlib

import numpy as np
import psutil
import pytest
from PIL import Image
from tests.models.inputs.images.small_encoders import noise, png, sent
from tests.models.inputs.images.small_prompts import processor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.prompts import ImageBytes
from attention_service.models.inputs.images.image_decoding import MAX_PIXELS, decoded, decoding_bytes, shortest_edge


def images(*contents):
    return [ImageBytes(**sent(each)) for each in contents]


def resident_bytes():
    return psutil.Process().memory_info().rss


def bomb(side):
    """Return a PNG of one colour: some kB that would be gigabytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, line = zlib.compressobj(9), bytes(1 + side // 8)
    data = b"".join(packer.compress(line) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format_is_decoded_as_rgb(form):
    (image,) = decoded(images(png(noise(), form)))
    assert (image.mode, image.size) == ("RGB", (96, 64))


def test_an_image_is_turned_as_its_exif_data_say():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn to the right
    (image,) = decoded(images(png(noise(), "JPEG", exif=exif)))
    assert image.size == (64, 96)


@pytest.mark.parametrize("side", [8_000, 16_000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_a_bomb_is_refused_by_its_header(side):
    content = bomb(side)
    assert len(content) < 200_000
    tracemalloc.start()
    try:
        for read in (decoding_bytes, decoded):
            with pytest.raises(InvalidRequest) as fault:
                read(images(png(noise()), content))
            assert fault.value.param == "images.1"
            assert fault.value.facts["limit"] == MAX_PIXELS
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("form", "at"), [("PNG", 16), ("GIF", 6)])
def test_a_file_that_cannot_hold_the_pixels_of_its_header_is_refused_by_it(form, at):
    content = bytearray(png(np.zeros((8, 8, 3), np.uint8), form))
    content[at : at + 8] = struct.pack(">II", 5_000, 5_000) if form == "PNG" else struct.pack("<HH4x", 5_000, 5_000)
    if form == "PNG":
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    for read in (decoding_bytes, decoded):
        with pytest.raises(InvalidRequest, match=r"images\.0: .* 5000 × 5000 pixels, more than its \d+ bytes can hold"):
            read(images(bytes(content)))


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_a_file_of_one_colour_holds_its_pixels(form):
    blank = io.BytesIO()
    Image.new("1" if form == "PNG" else "P", (5_000, 5_000)).save(blank, form, optimize=True)
    assert decoding_bytes(images(blank.getvalue())) > 0


@pytest.mark.long
@pytest.mark.sampled(size=1)
@pytest.mark.parametrize("size", [(1, 4_000_000), (4_000_000, 1), (2000, 2000)])
def test_decoding_takes_no_more_than_its_estimate(size):
    """Of an image one pixel wide, Pillow's pointers to its rows and its weights for resizing are larger than it is."""
    given = images(png(np.zeros((size[1], size[0], 3), np.uint8)))
    estimate, before, seen, done = decoding_bytes(given), resident_bytes(), [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            seen.append(resident_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        (image,) = decoded(given)
        image.resize((224, 224), Image.Resampling.LANCZOS)
    finally:
        done.set()
        watching.join()
    assert 0 < max(seen) - before < estimate


def test_images_are_limited_together():
    half = png(Image.new("L", (4096, 4096 + 1)))
    assert decoding_bytes(images(half)) > 4096 * 4096
    with pytest.raises(InvalidRequest) as fault:
        decoding_bytes(images(half, half))
    assert fault.value.param == "images.1"


def test_a_long_strip_counts_as_large_as_its_shorter_side_makes_it():
    """CLIP's processor gives 1 × 5,000 pixels a side of 40, and so 200,000 of the other."""
    strip, tall = images(png(Image.new("L", (5000, 1)))), images(png(Image.new("L", (2, 16_000))))
    assert decoding_bytes(strip) < 1_000_000
    assert decoding_bytes(strip, 40) > 40 * 200_000 * 3 * 8
    with pytest.raises(InvalidRequest, match="2 × 16000 pixels, 401408000 once its shorter side is resized") as fault:
        decoding_bytes(tall, 224)
    assert fault.value.param == "images.0"


@pytest.mark.parametrize(("kind", "edge"), [("llava", 40), ("qwen2_5_vl", 0), ("smolvlm", 0), ("gemma3", 0)])
def test_the_shorter_side_is_known_where_the_longer_has_no_limit(kind, edge):
    assert shortest_edge(processor(kind).image_processor) == edge


@pytest.mark.parametrize(
    "content",
    [
        b"no image at all", png(noise())[:300], png(noise(), "JPEG")[:40], b"%!PS-Adobe-3.0 EPSF-3.0\n",
        png(noise(), "TIFF"), png(noise(), "BMP"), b"\x89PNG\r\n\x1a\n" + bytes(64),
    ],
)  # fmt: skip
def test_what_is_broken_or_of_another_format_is_named(content):
    with pytest.raises(InvalidRequest) as fault:
        decoded(images(content))
    assert fault.value.param == "images.0"


def test_base64_is_checked():
    with pytest.raises(InvalidRequest, match="base64"):
        decoded([ImageBytes(base64="§§§§")])
    spaced = base64.encodebytes(png(noise())).decode()
    with pytest.raises(InvalidRequest, match="base64"):
        decoded([ImageBytes(base64=spaced)])


def test_random_changes_of_a_file_are_refused_or_decoded():
    rng, content = np.random.default_rng(0), png(noise(), "WEBP")
    for _ in range(100):
        changed = bytearray(content)
        for at in rng.integers(0, len(changed), 4):
            changed[at] = rng.integers(256)
        with contextlib.suppress(InvalidRequest):  # any other error is one of the service
            decoded(images(bytes(changed)))
