#include "data/tokenizers/sentencepiece_tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <mutex>
#include <span>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/sandboxed_child.h"
#include "cluster/base/random/philox.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/message_text.h"
#include "data/tokenizers/byte_pairs.h"
#include "data/tokenizers/line_iterator.h"
#include "data/tokenizers/tokenizer_file.h"
#include "data/tokenizers/word_cache.h"

namespace birkhoff {
namespace {

// Longer lines are cut: the trainer's time grows with the square of a line's length.
constexpr std::size_t kMaxTrainingLineBytes = 2048;

using Processor = std::unique_ptr<sentencepiece::SentencePieceProcessor>;

Processor load(const std::string& content, const std::string& file) {
  auto processor = std::make_unique<sentencepiece::SentencePieceProcessor>();
  const auto status = processor->LoadFromSerializedProto(content);
  if (!status.ok()) {
    fail(ExitCode::kData, "{}: not a SentencePiece model ({}); give an undamaged one", file,
         printable(status.ToString()));
  }
  return processor;
}

class SubwordTokenizer final : public Tokenizer {
 public:
  SubwordTokenizer(Processor processor, const std::string& content, const std::string& file,
                   std::int64_t vocabulary)
      : Tokenizer(file, processor->GetPieceSize(), vocabulary),
        processor_(std::move(processor)),
        byte_pairs_(BytePairs::of(content)) {
    for (int id = 0; id < processor_->GetPieceSize(); ++id) pieces_.push_back(piece_of(id));
  }

  std::vector<std::int32_t> encode(std::string_view text,
                                   std::string* unknown_text) const override {
    std::vector<std::int32_t> ids;
    ids.reserve(text.size() / 2);
    if (!byte_pairs_ || text.find(BytePairs::kSpace) != std::string_view::npos) {
      encode_by_library(text, ids, unknown_text);
      return ids;
    }
    const std::lock_guard lock(mutex_);
    for (bool is_first = true; !text.empty(); is_first = false) {
      std::string_view word = text.substr(0, byte_pairs_->word_length(text));
      text.remove_prefix(word.size());
      if (byte_pairs_->adds_space() && !is_first)
        word.remove_prefix(1);  // the library adds it again
      encode_word(word, ids, unknown_text);
    }
    return ids;
  }

  bool may_change_text() const override { return true; }

  std::optional<char> byte_of(std::int32_t id) const override {
    if (id >= processor_->GetPieceSize() || !processor_->IsByte(id)) return std::nullopt;
    // "<0xE4>", which the library has checked.
    const std::string& piece = processor_->IdToPiece(id);
    return static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16));
  }

 protected:
  std::string decode_pieces(const std::vector<std::int32_t>& ids) const override {
    std::string text;
    const auto status = processor_->Decode(std::vector<int>(ids.begin(), ids.end()), &text);
    require(status.ok(), "SentencePiece decodes ids below its vocabulary");
    return text;
  }
  std::optional<std::string> piece(std::int32_t id) const override {
    return pieces_[static_cast<std::size_t>(id)];
  }

 private:
  // Appends ids, and the text of unknown ones, of a text that is not empty.
  void encode_by_library(std::string_view text, std::vector<std::int32_t>& ids,
                         std::string* unknown_text) const {
    std::vector<int> found;
    const auto status = processor_->Encode({text.data(), text.size()}, &found);
    require(status.ok(), "SentencePiece encodes any text");
    ids.insert(ids.end(), found.begin(), found.end());
    const bool has_unknown = std::ranges::find(found, processor_->unk_id()) != found.end();
    if (unknown_text == nullptr || !has_unknown) return;
    const auto encoded = processor_->EncodeAsImmutableProto({text.data(), text.size()});
    for (const auto& piece : encoded.pieces()) {  // views of `encoded`
      if (static_cast<int>(piece.id()) == processor_->unk_id())
        *unknown_text += piece.surface() + kEndOfUnknown;
    }
  }

  // The same for a word of a text.
  void encode_word(std::string_view word, std::vector<std::int32_t>& ids,
                   std::string* unknown_text) const {
    if (const auto known = words_.find(word); !known.empty()) {
      ids.insert(ids.end(), known.begin(), known.end());
      return;
    }
    const auto begin = std::ssize(ids);
    if (!byte_pairs_->encode(word, ids)) encode_by_library(word, ids, unknown_text);
    const std::span of_word(ids.begin() + begin, ids.end());
    if (std::ranges::find(of_word, processor_->unk_id()) == of_word.end())
      words_.add(word, of_word);
  }

  std::optional<std::string> piece_of(std::int32_t id) const {
    if (processor_->IsUnknown(id)) return std::nullopt;
    if (processor_->IsControl(id)) return "";
    if (const std::optional<char> byte = byte_of(id)) return std::string(1, *byte);
    const std::string& marked = processor_->IdToPiece(id);
    std::string text;
    for (std::size_t at = 0; at < marked.size();) {
      const bool space = marked.compare(at, BytePairs::kSpace.size(), BytePairs::kSpace) == 0;
      text += space ? ' ' : marked[at];
      at += space ? BytePairs::kSpace.size() : 1;
    }
    return text;
  }

  const Processor processor_;
  const std::optional<BytePairs> byte_pairs_;
  std::vector<std::optional<std::string>> pieces_;  // by id
  mutable std::mutex mutex_;                        // of words_
  mutable WordCache words_;                         // without unknown ids
};

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const std::string& content,
                                                        const std::string& file,
                                                        std::int64_t vocabulary) {
  return std::make_unique<SubwordTokenizer>(load(content, file), content, file, vocabulary);
}

SentencePieceModel check_sentencepiece_model(const std::string& content, const std::string& file) {
  run_limited(file, [&] {
    const Processor processor = load(content, file);
    std::vector<int> ids;
    std::string text;
    const bool works =
        processor->Encode("A line of text.", &ids).ok() && processor->Decode(ids, &text).ok();
    if (!works)
      fail(ExitCode::kData,
           "{}: the SentencePiece model cannot encode a line; give an undamaged one", file);
  });
  const Processor processor = load(content, file);
  return {processor->GetPieceSize(), processor->eos_id()};
}

void LineSampler::add(std::string_view text) {
  constexpr std::uint64_t kKey = 0;
  const auto kept = [this](std::uint64_t hash) {
    return (hash & ((std::uint64_t{1} << level_) - 1)) == 0;
  };
  const auto bytes_of = [](const Line& entry) {
    return static_cast<std::int64_t>(sizeof(Line) + entry.text.size());
  };
  while (!text.empty()) {
    const std::size_t line = std::min(text.find('\n'), text.size());
    const std::size_t length =
        line <= kMaxTrainingLineBytes ? line : complete_utf8(text.substr(0, kMaxTrainingLineBytes));
    const auto words = philox(kKey, 0, num_seen_++);
    const std::uint64_t hash = std::uint64_t{words[0]} << 32 | words[1];
    if (length > 0 && kept(hash)) {
      lines_.push_back({hash, std::string(text.substr(0, length))});
      bytes_ += bytes_of(lines_.back());
    }
    text.remove_prefix(std::min(text.size(), length == line ? line + 1 : length));
    while (bytes_ > max_bytes_ && level_ < 63) {
      ++level_;
      std::erase_if(lines_, [&](const Line& entry) { return !kept(entry.hash); });
      bytes_ = 0;
      for (const Line& entry : lines_) bytes_ += bytes_of(entry);
    }
  }
}

std::vector<std::string> LineSampler::lines() const {
  std::vector<std::string> texts;
  for (const Line& entry : lines_) texts.push_back(entry.text);
  return texts;
}

std::string train_sentencepiece(const std::vector<std::string>& lines, std::int64_t vocab_size) {
  LineIterator iterator(lines);
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train({{"model_type", "bpe"},
                                                  {"vocab_size", std::to_string(vocab_size)},
                                                  {"byte_fallback", "true"},
                                                  {"character_coverage", "0.9995"},
                                                  {"normalization_rule_name", "identity"},
                                                  {"remove_extra_whitespaces", "false"},
                                                  {"add_dummy_prefix", "false"},
                                                  {"unk_id", "0"},
                                                  {"eos_id", "1"},
                                                  {"bos_id", "-1"},
                                                  {"pad_id", "-1"},
                                                  {"num_threads", "1"},
                                                  {"minloglevel", "3"}},
                                                 &iterator, &model);
  if (!status.ok()) {
    // SentencePiece's own advice ends with options of its program.
    const std::string said = printable(status.ToString());
    fail(ExitCode::kUsage,
         "--vocab-size {}: SentencePiece cannot learn that many pieces from this text ({}); choose "
         "another",
         vocab_size, said.substr(0, said.find(" Increase vocab_size")));
  }
  return model;
}

}  // namespace birkhoff
