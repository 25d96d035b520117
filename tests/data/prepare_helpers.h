// Helpers for the tests of prepare: they read a corpus or a folder back and generate text.
#pragma once

#include <map>
#include <random>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "data/corpus/label_reader.h"
#include "data/corpus/shard_reader.h"
#include "tests/data/helpers.h"

namespace birkhoff {

inline std::vector<std::int32_t> tokens_of(const Corpus& corpus, const std::string& split,
                                           const std::string& stream = "tokens") {
  StreamReader reader(corpus, split, stream);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(reader.elements()));
  reader.read(0, reader.elements(), ids.data());
  return {ids.begin(), ids.end()};
}

inline std::string text_of(const Corpus& corpus, const std::string& split) {
  return corpus.tokenizer()->decode(tokens_of(corpus, split));
}

inline std::vector<std::int64_t> labels_of(const Corpus& corpus, const std::string& split) {
  LabelReader reader(corpus, split, "label");
  std::vector<std::int64_t> labels(static_cast<std::size_t>(reader.rows()));
  reader.read(0, reader.rows(), labels.data());
  return labels;
}

inline std::vector<std::string> classes_of(const std::string& folder) {
  const Corpus corpus(folder);
  const auto& record = corpus.record("train", "label");
  return {record.class_name().begin(), record.class_name().end()};
}

// The texts of all documents, without their end marks. One tokenizer decodes them: SentencePiece's
// takes a process of its own to load.
inline std::vector<std::string> document_texts(const Corpus& corpus, const std::string& split,
                                               const std::string& stream = "tokens") {
  StreamReader reader(corpus, split, stream);
  const auto& entry = corpus.tokenizer_entry(stream);
  const auto tokenizer = corpus.tokenizer(stream);
  std::vector<std::string> texts;
  for (std::int64_t i = 0; i < corpus.stream(split, stream).documents(); ++i) {
    const auto [begin, end] = reader.document(i);
    std::vector<std::int64_t> ids(static_cast<std::size_t>(end - begin));
    reader.read(begin, end - begin, ids.data());
    if (entry.has_end_of_document()) {
      EXPECT_EQ(ids.back(), entry.end_of_document());
      ids.pop_back();
    }
    texts.push_back(tokenizer->decode({ids.begin(), ids.end()}));
  }
  return texts;
}

inline std::string document_text(const Corpus& corpus, const std::string& split, std::int64_t i,
                                 const std::string& stream = "tokens") {
  return document_texts(corpus, split, stream).at(static_cast<std::size_t>(i));
}

inline std::string joined_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// Of pairs of these lines, all for training. Writes folder/a.source and folder/a.target.
inline PrepareOptions pair_options(const TemporaryFolder& folder,
                                   const std::vector<std::string>& sources,
                                   const std::vector<std::string>& targets,
                                   const std::string& tokenizer = "bytes") {
  write_text(folder / "a.source", joined_lines(sources));
  write_text(folder / "a.target", joined_lines(targets));
  PrepareOptions options = prepare_options(folder / "corpus", {folder / "a.source"}, tokenizer);
  options.target_paths = {folder / "a.target"};
  options.valid_fraction = 0;
  return options;
}

// Every file of a folder and its content.
inline std::map<std::string, std::string> content_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const std::string& name : list_directory(folder))
    files[name] = read_text(folder + "/" + name);
  return files;
}

inline std::string sentences(int count, int seed) {
  const std::vector<std::string> words = {"the",     "na\u00efve", "transformer", "attends",
                                          "to",      "sorted",     "blocks",      "of",
                                          "\u20ac5", "tokens"};
  std::mt19937 random(static_cast<unsigned>(seed));
  std::string text;
  for (int i = 0; i < count; ++i) {
    for (int w = 0; w < 8; ++w) text += words[random() % words.size()] + " ";
    text += "end.\n";
  }
  return text;
}

}  // namespace birkhoff
