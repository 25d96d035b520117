// Each fuzz target passes one input to a reader of the product, as a malicious file. A valid input
// is read, and the result keeps the reader's promises. Any other input ends in an Error with the
// reader's exit code and one short line. Everything else (a crash, another exception, a broken
// promise) leaves the function as an exception that is not an Error, or as a signal.
// libfuzzer_main.cpp runs one target under libFuzzer, replay_test.cpp all targets over the seeds.
#pragma once

#include <string_view>

namespace birkhoff {

// A configuration text; after a line "--set", one setting per line.
void fuzz_config_text(std::string_view input);
// manifest.json of a corpus: as given, and with a matching fingerprint.
void fuzz_corpus_manifest(std::string_view input);
// manifest.json of a checkpoint: as given, and with a matching checksum inserted after its first
// brace.
void fuzz_checkpoint_manifest(std::string_view input);
// A safetensors file: as given, and as the header of a file, where the first two bytes are the size
// of its data.
void fuzz_safetensors(std::string_view input);
// The shards of a corpus: numbers for a manifest, then values and document ends, with matching
// checksums. The stream reader and the evaluation's loader read them.
void fuzz_shard(std::string_view input);
// A vocabulary file: the first byte chooses characters or words, the second a vocabulary size near
// the file's. SentencePiece models are not fuzzed, because their own library parses them. The
// product loads them first in a limited child process (cluster/base/files/sandboxed_child.h), and
// tests/data/tokenizer_test.cpp damages them.
void fuzz_tokenizer(std::string_view input);

// Files of images. A PNG, and a JPEG.
void fuzz_png(std::string_view input);
void fuzz_jpeg(std::string_view input);
// The first two bytes are the size of a file of labels, which follows; the rest is its images.
void fuzz_idx(std::string_view input);
void fuzz_cifar(std::string_view input);
void fuzz_npz(std::string_view input);

// An HDF5 file of point sets, read in a child process as the product does: the library is not
// trusted, so its crash is a refusal. libFuzzer sees no coverage of the child.
void fuzz_modelnet(std::string_view input);

}  // namespace birkhoff
