#include <algorithm>

#include "cluster/base/text/utf8.h"
#include "data/tokenizers/tokenizer_file.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {
namespace {

// `unknown`: the id of text that the vocabulary lacks, -1 if there is none.
void expect_round_trip(const Tokenizer& tokenizer, const std::string& text, std::int32_t unknown) {
  is_accepted(ExitCode::kData, [&] {
    const std::vector<std::int32_t> ids = tokenizer.encode(text);
    for (const std::int32_t id : ids) {
      expect_promise(id >= 0 && id < tokenizer.vocabulary(), "ids are below the vocabulary");
    }
    if (std::find(ids.begin(), ids.end(), unknown) != ids.end()) return;
    const std::string back = tokenizer.decode(ids);
    expect_promise(tokenizer.drops_white_space() || back == text,
                   "known text comes back from its ids");
    expect_promise(tokenizer.encode(back) == ids, "the same ids come back from that");
  });
}

}  // namespace

void fuzz_tokenizer(std::string_view input) {
  ByteReader reader(input);
  const bool chars = reader.take<std::uint8_t>() % 2 == 0;
  const int surplus = reader.take<std::uint8_t>() % 4 - 1;
  const std::string content(reader.rest());
  // One line per id, except for the header lines and the unknown id.
  const auto lines = static_cast<std::int64_t>(std::count(content.begin(), content.end(), '\n'));
  const bool words = !chars && content.starts_with("birkhoff words ");
  const bool has_unknown = words || content.find("unknown yes\n") != std::string::npos;
  const std::int64_t num_ids = words ? lines : lines - 2 + (has_unknown ? 1 : 0);
  std::unique_ptr<Tokenizer> tokenizer;
  if (!is_accepted(ExitCode::kData, [&] {
        tokenizer = chars ? make_char_tokenizer(content, "tokenizer.chars", num_ids + surplus)
                          : make_word_tokenizer(content, "tokenizer.words", num_ids + surplus);
      })) {
    return;
  }
  std::vector<std::int32_t> all;
  for (std::int32_t id = 0; id < tokenizer->vocabulary(); ++id) all.push_back(id);
  const std::string text = tokenizer->decode(all);
  if (chars) {
    expect_promise(find_invalid_utf8(text) == std::string::npos, "characters are UTF-8");
  }
  const auto unknown = static_cast<std::int32_t>(words ? 0 : num_ids - 1);
  for (const std::string& sample : {text, content}) {
    expect_round_trip(*tokenizer, sample, has_unknown ? unknown : -1);
  }
  is_accepted(ExitCode::kData, [&] {
    tokenizer->decode({static_cast<std::int32_t>(tokenizer->vocabulary())});
    expect_promise(false, "ids beyond the vocabulary are refused");
  });
}

}  // namespace birkhoff
