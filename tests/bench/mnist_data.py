"""MNIST's 10,000 test images, of which 8,000 train and 2,000 test here. BIRKHOFF_DATA names the
folder that holds mnist.t10k-images-idx3-ubyte.gz and mnist.t10k-labels-idx1-ubyte.gz."""

import gzip
import os
import pathlib
import struct

import birkhoff_runs as runs

FOLDER = runs.WORK / "mnist"
SPLITS = {"train": (0, 8000), "test": (8000, 10000)}


def images():
    """The bytes of the images, 28 x 28 each, and of their labels."""
    source = os.environ.get("BIRKHOFF_DATA")
    if not source:
        raise SystemExit("set BIRKHOFF_DATA to the folder that holds mnist.t10k-*.gz")

    def content(name, header):
        path = pathlib.Path(source) / f"mnist.t10k-{name}.gz"
        return gzip.decompress(path.read_bytes())[header:]

    return content("images-idx3-ubyte", 16), content("labels-idx1-ubyte", 8)


def corpus():
    """A corpus of the two splits, made only if it is missing."""
    folder = FOLDER / "corpus"
    if (folder / "manifest.json").exists():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    pixels, labels = images()
    arguments = ["--valid", 0]
    for split, (begin, end) in SPLITS.items():
        path = FOLDER / f"{split}-images-idx3-ubyte"
        path.write_bytes(struct.pack(">4i", 0x803, end - begin, 28, 28) +
                         pixels[begin * 784:end * 784])
        (FOLDER / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 0x801, end - begin) + labels[begin:end])
        arguments += [f"--{split}", path]
    runs.birkhoff("prepare", "--out", folder, "--images", *arguments)
    return folder
