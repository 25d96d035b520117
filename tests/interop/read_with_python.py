"""Opens Birkhoff's files with widely used Python readers, and compares the content with Birkhoff's
manifests and metrics.

  checkpoints   safetensors (Hugging Face), with the index that their loaders look for, against
  manifest.json corpora       h5py, against manifest.json
  events        TensorBoard's own reader, against metrics.jsonl

    python3 read_with_python.py --run RUN --corpus CORPUS

Prints what was read. At the first difference it prints that difference and ends with 1.
"""

import argparse
import json
import pathlib
import sys

import h5py
import numpy
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ELEMENT_BYTES = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "U8": 1}
CORPUS_TYPES = {"u8": "<u1", "u16": "<u2", "i32": "<i4", "f32": "<f4"}
OLDER_PAGE_BYTES = 64 << 10


def check(good, what):
    if not good:
        sys.exit(f"difference: {what}")


def integers(values):
    """Protobuf's JSON mapping writes 64-bit integers as strings."""
    return [int(value) for value in values]


def crc32c(data):
    """CRC32C (Castagnoli), bit-reflected, one table: slow and simple, for a few pages."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def make_crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = make_crc_table()


def raw_bytes(path, key):
    """A tensor's bytes, found only by the 8-byte header length and data_offsets, as
    docs/checkpoint_format.md describes."""
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    check((8 + header_bytes) % 64 == 0, f"{path}: data does not start at a multiple of 64")
    begin, end = json.loads(content[8:8 + header_bytes])[key]["data_offsets"]
    return content[8 + header_bytes + begin:8 + header_bytes + end]


def read_checkpoint(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    check(manifest["format"] == "birkhoff checkpoint", f"{folder}: format")
    listed = {}
    for tensor in manifest["tensor"]:
        listed.setdefault(tensor["file"], {})[tensor["key"]] = tensor
    for file in manifest["file"]:
        size = (folder / file["name"]).stat().st_size
        check(size == int(file.get("bytes", 0)), f"{file['name']}: {size} bytes")

    total_bytes = num_tensors = 0
    for name, tensors in listed.items():
        path = folder / name
        with safe_open(path, framework="numpy") as reader:
            check(set(reader.keys()) == set(tensors), f"{name}: keys")
            check(reader.metadata() == {"format": "pt"}, f"{name}: metadata {reader.metadata()}")
            for key, tensor in tensors.items():
                elements = int(tensor.get("flat_end", 0)) - int(tensor.get("flat_begin", 0))
                global_shape = integers(tensor.get("global_shape", []))
                whole = elements == int(numpy.prod(global_shape, dtype=numpy.int64))
                entry = reader.get_slice(key)
                check(entry.get_dtype() == tensor["dtype"], f"{key}: dtype {entry.get_dtype()}")
                check(entry.get_shape() == (global_shape if whole else [elements]),
                      f"{key}: shape {entry.get_shape()}")
                raw = raw_bytes(path, key)
                check(
                    len(raw) == elements * ELEMENT_BYTES[tensor["dtype"]],
                    f"{key}: {len(raw)} bytes")
                if tensor["dtype"] != "BF16":  # numpy has no bfloat16
                    check(reader.get_tensor(key).tobytes() == raw, f"{key}: values")
                if len(raw) <= PAGE_BYTES:
                    check(crc32c(raw) == tensor.get("crc32c", 0), f"{key}: CRC32C")
                if tensor["kind"] != "optimizer" and whole:
                    check(index["weight_map"].get(key) == name, f"{key}: index")
                    total_bytes += len(raw)
                num_tensors += 1
    parameters = [t for t in manifest["tensor"] if t["key"] in index["weight_map"]]
    check(len(parameters) == len(index["weight_map"]), "index: names")
    check(index["metadata"]["total_size"] == total_bytes, f"index: total_size is not {total_bytes}")
    print(
        f"{folder}: step {manifest['step']}, {num_tensors} tensors in {len(listed)} safetensors "
        "files, "
        f"{len(parameters)} parameters of {total_bytes} bytes in the index")


def read_values(path, file, name, array, shard):
    """The values of a shard, compared with its manifest entry, its page table and the bytes at the
    offset that training uses."""
    values, pages = file[name], file["page_crcs"]
    check(values.dtype == numpy.dtype(CORPUS_TYPES[array.get("dtype", "u8")]),
          f"{path}: dtype {values.dtype}")
    check(values.shape[0] == int(shard["elements"]), f"{path}: {values.shape[0]} elements")
    check(values.id.get_offset() == int(shard["values_offset"]), f"{path}: values_offset")
    content = values[:].tobytes()
    page_bytes = int(shard.get("page_bytes", OLDER_PAGE_BYTES))
    for page in sorted({0, (len(content) - 1) // page_bytes}):
        part = content[page * page_bytes:(page + 1) * page_bytes]
        check(crc32c(part) == int(pages[page]), f"{path}: CRC32C of page {page}")
    with open(path, "rb") as raw:
        raw.seek(int(shard["values_offset"]))
        check(raw.read(len(content)) == content, f"{path}: bytes at values_offset")
    return values[:]


def read_stream(folder, split, stream):
    elements = documents = 0
    for shard in stream.get("shard", []):
        path = folder / shard["file"]
        with h5py.File(path, "r") as file:
            values, ends = read_values(path, file, "tokens", stream, shard), file["document_ends"]
            check(ends.shape[0] == int(shard.get("documents", 0)),
                  f"{path}: {ends.shape[0]} documents")
            ends = ends[:]
            check(numpy.all(ends[1:] >= ends[:-1]), f"{path}: document ends descend")
            elements += values.shape[0]
            documents += len(ends)
            if len(ends):
                check(ends[-1] <= elements, f"{path}: a document ends after its tokens")
            yield values
    check(elements == int(stream["elements"]), f"{split} {stream['name']}: {elements} elements")
    check(documents == int(stream["documents"]), f"{split} {stream['name']}: {documents} documents")


def read_record(folder, split, record):
    """How many rows each class has; empty for a record without classes."""
    counts = numpy.zeros(len(record.get("class_name", [])), dtype=int)
    rows = 0
    for shard in record.get("shard", []):
        path = folder / shard["file"]
        with h5py.File(path, "r") as file:
            check(set(file) == {"values", "page_crcs"}, f"{path}: data sets {sorted(file)}")
            values = read_values(path, file, "values", record, shard)
            check(list(values.shape[1:]) == integers(record.get("shape", [])),
                  f"{path}: shape {values.shape}")
            rows += len(values)
            if len(counts):
                check(values.max() < len(counts), f"{path}: label {values.max()} of {len(counts)}")
                counts += numpy.bincount(values, minlength=len(counts))
    check(rows == int(record["rows"]), f"{split} {record['name']}: {rows} rows")
    return counts


def read_corpus(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    check(manifest["format"] == "birkhoff corpus", f"{folder}: format")
    vocabulary = int(manifest.get("tokenizer", {}).get("vocabulary", 0))
    for split in manifest["split"]:
        for stream in split.get("stream", []):
            largest = num_tokens = 0
            for values in read_stream(folder, split["name"], stream):
                largest = max([largest, *([int(values.max())] if len(values) else [])])
                num_tokens += len(values)
            check(largest < vocabulary, f"{split['name']}: id {largest} of {vocabulary}")
            print(
                f"{folder}: {split['name']} {stream['name']}: {num_tokens} tokens in "
                f"{len(stream.get('shard', []))} "
                f"HDF5 shards, {stream['documents']} documents, largest id {largest} of "
                f"{vocabulary}"
            )
        for record in split.get("record", []):
            counts = read_record(folder, split["name"], record)
            classes = ""
            if len(counts):
                classes = f" of {len(counts)} classes, {counts.min()} to {counts.max()} rows each"
            print(f"{folder}: {split['name']} {record['name']}: {record['rows']} rows{classes}")


def read_events(folder):
    expected = {}  # tag to {step: value}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        group = line.get("split", "train")
        names = line.keys() - {"step", "split", "tokens", "bytes", "step_ms", "elapsed_seconds"
                              }  # these are not in the events
        for name in names:
            if line[name] is not None:
                expected.setdefault(f"{group}/{name}", {})[line["step"]] = numpy.float32(line[name])
    if not list(folder.glob("events.out.tfevents.*")):
        sys.exit(f"{folder}: no TensorBoard events; train with metrics.tensorboard: true")
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    # TensorBoard returns simple values as scalars or, after its own migration, as tensors.
    read = {
        tag: {
            e.step: numpy.float32(e.value)
            for e in accumulator.Scalars(tag)
            if numpy.isfinite(e.value)
        } for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:
        read[tag] = {
            e.step: numpy.float32(e.tensor_proto.float_val[0]) for e in accumulator.Tensors(tag)
        }
    check(
        set(read) == set(expected),
        f"{folder}: tags {sorted(read)}, metrics.jsonl has {sorted(expected)}")
    for tag, values in expected.items():
        check(read[tag] == values, f"{folder}: {tag}: events differ from metrics.jsonl")
        print(f"{folder}: {tag}: {len(values)} values in the events, equal to metrics.jsonl")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run",
                        type=pathlib.Path,
                        help="a run folder with at least one checkpoint")
    parser.add_argument("--corpus", type=pathlib.Path, help="a folder made by `birkhoff prepare`")
    arguments = parser.parse_args()
    if not (arguments.run or arguments.corpus):
        parser.error("give --run, --corpus, or both")
    if arguments.run:
        checkpoints = sorted((arguments.run / "checkpoints").glob("step-*"))
        check(checkpoints, f"no checkpoint in {arguments.run}")
        for checkpoint in checkpoints:
            read_checkpoint(checkpoint)
        read_events(arguments.run)
    if arguments.corpus:
        read_corpus(arguments.corpus)


if __name__ == "__main__":
    main()
