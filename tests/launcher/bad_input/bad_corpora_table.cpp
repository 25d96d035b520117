// Damaged corpora: shards, tokenizer files, whole folders.
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

#include "configs/schema/corpus_manifest.pb.h"
#include "data/prepare/prepare.h"

namespace birkhoff {
namespace {

BadInput data(std::string name, std::string line, std::vector<std::string> words,
              std::function<void()> spoil) {
  return {.name = "corpus " + name,
          .line = std::move(line),
          .code = ExitCode::kData,
          .words = std::move(words),
          .spoil = std::move(spoil)};
}

std::int64_t values_offset(const std::string& folder) {
  std::int64_t offset = 0;
  edit_corpus(folder, [&](configs::CorpusManifest& manifest) {
    offset = manifest.split(1).stream(0).shard(0).values_offset();
  });
  return offset;
}

std::vector<BadInput> shards() {
  return {
      as_process_too(data("shard missing", "verify corpus",
                          {"train-tokens-00000.h5", "No such file"},
                          [] { remove_one(shard_file("corpus", "train")); })),
      data("shard missing, seen by inspect", "inspect corpus",
           {"train-tokens-00000.h5", "No such file"},
           [] { remove_one(shard_file("corpus", "train")); }),
      data("shard missing, seen by train", "train good.txtpb --run new",
           {"train-tokens-00000.h5", "No such file"},
           [] { remove_one(shard_file("corpus", "train")); }),
      data("shard truncated to nothing", "inspect corpus", {"valid-tokens-00000.h5", "0 bytes"},
           [] { truncate_to(shard_file("corpus", "valid"), 0); }),
      data("shard truncated by a byte", "inspect corpus",
           {"valid-tokens-00000.h5", "bytes, the manifest says"},
           [] {
             truncate_to(
                 shard_file("corpus", "valid"),
                 static_cast<std::int64_t>(read_bytes(shard_file("corpus", "valid")).size()) - 1);
           }),
      data("shard truncated to half, seen by train", "train good.txtpb --run new",
           {"valid-tokens-00000.h5", "the manifest says"},
           [] { truncate_to(shard_file("corpus", "valid"), 1000); }),
      data("shard grown", "verify corpus", {"valid-tokens-00000.h5", "the manifest says"},
           [] { append_bytes(shard_file("corpus", "valid"), "more"); }),
      data("shard a folder", "inspect corpus", {"valid-tokens-00000.h5"},
           [] {
             const std::string file = shard_file("corpus", "valid");
             remove_one(file);
             std::filesystem::create_directory(file);
           }),
      data("shard a dangling link", "inspect corpus", {"valid-tokens-00000.h5", "No such file"},
           [] {
             const std::string file = shard_file("corpus", "valid");
             remove_one(file);
             std::filesystem::create_symlink("nowhere", file);
           }),
      data("first byte of a shard flipped", "verify corpus", {"train-tokens-00000.h5", "hash"},
           [] { flip_bit(shard_file("corpus", "train"), 0); }),
      data("last byte of a shard flipped", "verify corpus", {"train-tokens-00000.h5", "page table"},
           [] { flip_bit(shard_file("corpus", "train"), -1); }),
      as_process_too(data(
          "token flipped, seen by eval", "eval run", {"valid-tokens-00000.h5", "page 0", "damaged"},
          [] { flip_bit(shard_file("corpus", "valid"), values_offset("corpus") + 1); })),
      data("token flipped, seen by verify", "verify corpus",
           {"valid-tokens-00000.h5", "page 0 of /tokens"},
           [] { flip_bit(shard_file("corpus", "valid"), values_offset("corpus") + 1); }),
      data("token flipped under a fitting hash", "verify corpus",
           {"valid-tokens-00000.h5", "differs from its checksum"},
           [] {
             const std::string file = shard_file("corpus", "valid");
             flip_bit(file, values_offset("corpus") + 1);
             accept_shard("corpus", "valid");
           }),
      data("page table flipped, seen by eval", "eval run", {"valid-tokens-00000.h5", "page table"},
           [] {
             std::int64_t offset = 0;
             edit_corpus("corpus", [&](configs::CorpusManifest& m) {
               offset = m.split(1).stream(0).shard(0).page_crcs_offset();
             });
             flip_bit(shard_file("corpus", "valid"), offset);
           }),
      data("shards of a split swapped", "verify corpus", {"train-tokens-00000.h5", "page table"},
           [] { swap_files("corpus/train-tokens-00000.h5", "corpus/train-tokens-00001.h5"); }),
      data("shards of two splits swapped", "verify corpus", {"train-tokens-00000.h5", "page table"},
           [] { swap_files("corpus/train-tokens-00000.h5", "corpus/valid-tokens-00000.h5"); }),
      data("shard of another corpus", "verify corpus", {"train-tokens-00000.h5", "page table"},
           [] {
             write_bytes("corpus/train-tokens-00000.h5", read_bytes("other/train-tokens-00000.h5"));
           }),
      data("shard of zeros of its size", "verify corpus", {"train-tokens-00000.h5", "page table"},
           [] {
             write_bytes("corpus/train-tokens-00000.h5",
                         std::string(read_bytes("corpus/train-tokens-00000.h5").size(), '\0'));
           }),
      data("shard that is no HDF5 under a fitting hash", "verify corpus",
           {"valid-tokens-00000.h5", "HDF5"},
           [] {
             write_bytes(shard_file("corpus", "valid"),
                         "not HDF5" + read_bytes(shard_file("corpus", "valid")).substr(8));
             accept_shard("corpus", "valid");
           }),
      as_process_too(data("id above the vocabulary, seen by verify", "verify corpus",
                          {"valid-tokens-00000.h5", "200", "vocabulary"},
                          [] { forge_ids("corpus", "valid", 5, 200, 1); })),
      data("id above the vocabulary, seen by eval", "eval run",
           {"valid-tokens-00000.h5", "token 5", "200", "vocabulary"},
           [] { forge_ids("corpus", "valid", 5, 200, 1); }),
      data("id just above the vocabulary", "verify corpus", {"train-tokens-00000.h5", "vocabulary"},
           [] {
             std::int64_t vocabulary = 0;
             edit_corpus("corpus", [&](configs::CorpusManifest& m) {
               vocabulary = m.tokenizer().vocabulary();
             });
             forge_ids("corpus", "train", 1023, static_cast<std::uint32_t>(vocabulary), 1);
           }),
      // The only document of a split ends in its last shard; the valid split of words/ has one
      // shard.
      data("document end before the text's", "verify words", {"document"},
           [] { forge_document_end("words", "valid", 0, 7); }),
      data("document end behind the text's", "verify words", {"valid-tokens-00000.h5", "document"},
           [] { forge_document_end("words", "valid", 0, 1u << 30); }),
      data("document end 0", "verify words", {"valid-tokens-00000.h5", "document"},
           [] { forge_document_end("words", "valid", 0, 0); }),
  };
}

std::vector<BadInput> tokenizers() {
  return {
      data("vocabulary of characters missing", "verify corpus", {"tokenizer.chars", "No such file"},
           [] { remove_one("corpus/tokenizer.chars"); }),
      data("vocabulary of characters flipped", "verify corpus", {"tokenizer.chars", "hash"},
           [] { flip_bit("corpus/tokenizer.chars", -2); }),
      data("vocabulary of characters missing, seen by train", "train good.txtpb --run new",
           {"tokenizer.chars", "No such file"}, [] { remove_one("corpus/tokenizer.chars"); }),
      as_process_too(data("vocabulary of characters flipped, seen by train",
                          "train good.txtpb --run new", {"tokenizer.chars", "hash"},
                          [] { flip_bit("corpus/tokenizer.chars", -2); })),
      data("vocabulary of characters truncated", "verify corpus", {"tokenizer.chars", "hash"},
           [] { truncate_to("corpus/tokenizer.chars", 20); }),
      data("vocabulary of words missing", "verify words", {"tokenizer.words", "No such file"},
           [] { remove_one("words/tokenizer.words"); }),
      data("vocabulary of words emptied", "verify words", {"tokenizer.words", "hash"},
           [] { truncate_to("words/tokenizer.words", 0); }),
      data("SentencePiece model missing", "verify pieces", {"tokenizer.model", "No such file"},
           [] { remove_one("pieces/tokenizer.model"); }),
      data("SentencePiece model flipped", "verify pieces", {"tokenizer.model", "hash"},
           [] { flip_bit("pieces/tokenizer.model", 1000); }),
      data("characters without a header, accepted", "verify corpus",
           {"tokenizer.chars:1", "not a vocabulary"},
           [] { accept_tokenizer("corpus", "chars\n"); }),
      data("characters of a text file, accepted", "verify corpus", {"tokenizer.chars:1"},
           [] { accept_tokenizer("corpus", read_bytes("text/one.txt")); }),
      data("characters cut in a line, accepted", "verify corpus", {"tokenizer.chars", "no end"},
           [] {
             const std::string old = read_bytes("corpus/tokenizer.chars");
             accept_tokenizer("corpus", old.substr(0, old.size() - 1));
           }),
      data("characters not ascending, accepted", "verify corpus", {"tokenizer.chars", "ascending"},
           [] { accept_tokenizer("corpus", read_bytes("corpus/tokenizer.chars") + "20\n"); }),
      data("characters of a smaller vocabulary, accepted", "verify corpus",
           {"tokenizer.chars", "ids", "vocabulary"},
           [] {
             std::string old = read_bytes("corpus/tokenizer.chars");
             for (int i = 0; i < 3; ++i) old.resize(old.rfind('\n', old.size() - 2) + 1);
             accept_tokenizer("corpus", old);
           }),
      data("words without a header, accepted", "verify words",
           {"tokenizer.words:1", "not a vocabulary"}, [] { accept_tokenizer("words", "the\n"); }),
      data("words listed twice, accepted", "verify words", {"tokenizer.words", "twice"},
           [] {
             const std::string old = read_bytes("words/tokenizer.words");
             const std::size_t begin = old.rfind('\n', old.size() - 2) + 1;
             const std::size_t before = old.rfind('\n', begin - 2) + 1;
             accept_tokenizer("words", old.substr(0, begin) + old.substr(before, begin - before));
           }),
      data("SentencePiece model of noise, accepted", "verify pieces",
           {"tokenizer.model", "SentencePiece"},
           [] { accept_tokenizer("pieces", std::string(3000, '\xab')); }),
      data(
          "SentencePiece model cut, accepted", "verify pieces",
          {"tokenizer.model", "SentencePiece"},
          [] { accept_tokenizer("pieces", read_bytes("pieces/tokenizer.model").substr(0, 2500)); }),
      data("SentencePiece model empty, accepted", "verify pieces", {"tokenizer.model"},
           [] { accept_tokenizer("pieces", ""); }),
      data("SentencePiece model of the wrong kind, accepted", "verify pieces",
           {"tokenizer.model", "SentencePiece"},
           [] { accept_tokenizer("pieces", read_bytes("words/tokenizer.words")); }),
  };
}

std::vector<BadInput> uses() {
  return {
      {.name = "eval on a missing corpus",
       .line = "eval run --corpus nowhere",
       .code = ExitCode::kData,
       .words = {"nowhere", "no such folder", "relative paths start at", "birkhoff prepare"}},
      {.name = "eval on a missing corpus by its full path",
       .line = "eval run --corpus /nowhere/corpus",
       .code = ExitCode::kData,
       .words = {"/nowhere/corpus: no such folder;", "birkhoff prepare"}},
      {.name = "eval on a run as corpus",
       .line = "eval run --corpus run",
       .code = ExitCode::kData,
       .words = {"run", "manifest.json"}},
      {.name = "eval on a checkpoint as corpus",
       .line = "eval run --corpus run/checkpoints/step-00000004",
       .code = ExitCode::kData,
       .words = {"step-00000004"}},
      {.name = "eval on a corpus of another tokenizer",
       .line = "eval run --corpus bytes",
       .code = ExitCode::kData,
       .words = {"bytes", "256 ids", "not the model's", "chars",
                 "birkhoff prepare --out NEW --like run TEXT", "birkhoff eval run --text TEXT"}},
      {.name = "eval on a corpus with an end mark, of a model without",
       .line = "eval run --corpus two",
       .code = ExitCode::kData,
       .words = {"two", "documents end in id", "prepare --out NEW --like run TEXT"},
       .spoil =
           [] {
             PrepareOptions options;
             options.out = "two";
             options.tokenizer = "corpus/tokenizer.chars";
             options.paths = {"text"};
             prepare_corpus(options);
           }},
      {.name = "eval on a text of other characters",
       .line = "eval run --text capitals.txt",
       .code = ExitCode::kData,
       .words = {"capitals.txt", "character 'C'", "U+0043"},
       .spoil = [] { write_bytes("capitals.txt", "CAPITALS"); },
       .where = Where::kHereAndProcess},
      {.name = "eval on a text of a letter",
       .line = "eval run --text letter.txt",
       .code = ExitCode::kData,
       .words = {"letter.txt", "1 token", "too few"},
       .spoil = [] { write_bytes("letter.txt", "a"); }},
      {.name = "eval on Latin-1",
       .line = "eval run --text latin.txt",
       .code = ExitCode::kData,
       .words = {"latin.txt", "byte 3", "UTF-8"},
       .spoil = [] { write_bytes("latin.txt", "caf\xe9 au lait"); }},
      {.name = "eval on a corpus of other characters",
       .line = "eval run --corpus corpus",
       .code = ExitCode::kData,
       .words = {"corpus", "not the model's"},
       .spoil =
           [] {
             std::string characters = read_bytes("corpus/tokenizer.chars");
             characters[characters.size() - 2] ^= 1;  // of the last one
             accept_tokenizer("corpus", characters);
           }},
      {.name = "eval where the run's corpus is gone",
       .line = "eval run",
       .code = ExitCode::kData,
       .words = {"corpus", "birkhoff prepare"},
       .spoil = [] { remove_one("corpus"); },
       .where = Where::kHereAndProcess},
      {.name = "eval on a split that is not there",
       .line = "eval run --split test",
       .code = ExitCode::kData,
       .words = {"split 'test'", "it has: train, valid"},
       .spoil =
           [] {
             edit_corpus("corpus",
                         [](configs::CorpusManifest& m) { m.mutable_split()->RemoveLast(); });
           }},
      {.name = "bigram figures without a valid split",
       .line = "inspect corpus --bigram",
       .code = ExitCode::kData,
       .words = {"split 'valid'", "train, test"},
       .spoil =
           [] {
             edit_corpus("corpus", [](configs::CorpusManifest& m) {
               m.mutable_split()->DeleteSubrange(1, 1);
             });
           }},
      {.name = "train without a train split",
       .line = "train good.txtpb --run new",
       .code = ExitCode::kData,
       .words = {"split 'train'", "it has: valid, test"},
       .spoil =
           [] {
             edit_corpus("corpus", [](configs::CorpusManifest& m) {
               m.mutable_split()->DeleteSubrange(0, 1);
             });
           },
       .where = Where::kProcess},
      {.name = "prepare over a damaged corpus",
       .line = "prepare --out bytes text/one.txt",
       .code = ExitCode::kData,
       .words = {"bytes/manifest.json"},
       .spoil = [] { truncate_to("bytes/manifest.json", 300); }},
      {.name = "prepare over a corpus whose text has changed",
       .line = "prepare --out made --tokenizer bytes text/one.txt",
       .code = ExitCode::kUsage,
       .words = {"--out made", "other text"},
       .spoil =
           [] {
             run_child({.line = birkhoff_line(
                            {"prepare", "--out", "made", "--tokenizer", "bytes", "text/one.txt"})});
             append_bytes("text/one.txt", "more");
           }},
  };
}

}  // namespace

std::vector<BadInput> bad_corpora() {
  std::vector<BadInput> rows;
  for (auto table : {shards, tokenizers, uses}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
