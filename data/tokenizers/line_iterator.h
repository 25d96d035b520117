// Lines as SentencePiece's trainer takes them.
#pragma once

#include <sentencepiece_trainer.h>

#include <cstddef>
#include <string>
#include <vector>

namespace birkhoff {

// `lines` must outlive it.
class LineIterator final : public sentencepiece::SentenceIterator {
 public:
  explicit LineIterator(const std::vector<std::string>& lines) : lines_(lines) {}
  bool done() const override { return next_ == lines_.size(); }
  void Next() override { ++next_; }
  const std::string& value() const override { return lines_[next_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::vector<std::string>& lines_;
  std::size_t next_ = 0;
};

}  // namespace birkhoff
