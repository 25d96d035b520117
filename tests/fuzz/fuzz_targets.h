// What each fuzz target does with one input: it gives the bytes to a reader of the product as a
// file of an enemy. A sound input is read, and what was read keeps the reader's promises; any other
// ends in an Error of the reader's own code and one short line. Everything else (a crash, another
// exception, a broken promise) leaves the function as an exception that is no Error, or as a
// signal. libfuzzer_main.cpp runs one of them under libFuzzer, replay_test.cpp all of them over the
// seeds.
#pragma once

#include <string_view>

namespace birkhoff {

// A configuration text; behind a line that reads "--set", one setting a line.
void fuzz_config_text(std::string_view input);
// manifest.json of a corpus, as it is and with the fingerprint made to fit.
void fuzz_corpus_manifest(std::string_view input);
// manifest.json of a checkpoint, as it is and, behind its first brace, with the checksum made to
// fit.
void fuzz_checkpoint_manifest(std::string_view input);
// A safetensors file, as it is and as the header of one: the first two bytes are then the size of
// its data.
void fuzz_safetensors(std::string_view input);
// A corpus' shards: numbers that make a manifest, then values and document ends, with checksums
// that fit; read by the stream reader and by the evaluation's loader.
void fuzz_shard(std::string_view input);
// A vocabulary file: the first byte chooses characters or words, the second a vocabulary near the
// file's. SentencePiece's files are its own library's matter: the product loads them in a limited
// child process first (cluster/base/files/limited_child.h), and tests/data/tokenizer_test.cpp
// damages them.
void fuzz_tokenizer(std::string_view input);

}  // namespace birkhoff
