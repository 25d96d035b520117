#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "data/scores/bleu.h"
#include "data/text/text_lines.h"
#include "launcher/commands.h"
#include "launcher/commands/text_input.h"

namespace birkhoff {
namespace {

std::string json_of(const BleuCounts& counts, int num_references, BleuTokenizer tokenizer) {
  const Bleu bleu = counts.bleu();
  const nlohmann::ordered_json object = {{"bleu", bleu.score},
                                         {"precisions", bleu.precisions},
                                         {"brevity_penalty", bleu.brevity_penalty},
                                         {"hypothesis_words", counts.hypothesis_words},
                                         {"reference_words", counts.reference_words},
                                         {"matches", counts.matches},
                                         {"ngrams", counts.ngrams},
                                         {"signature", bleu_signature(num_references, tokenizer)}};
  return object.dump();
}

}  // namespace

int bleu_command(const BleuArguments& arguments, std::ostream& out) {
  const BleuTokenizer tokenizer = bleu_tokenizer(arguments.tokenize);
  if ((arguments.hypotheses == "-") + std::ranges::count(arguments.references, "-") > 1) {
    fail(ExitCode::kUsage, "-: standard input can be only one of the files; name the others");
  }
  TextLines hypotheses = open_lines(arguments.hypotheses);
  std::vector<TextLines> references;
  for (const std::string& path : arguments.references) references.push_back(open_lines(path));

  BleuCounts counts;
  std::int64_t num_segments = 0;
  for (;;) {
    const std::optional<std::string_view> hypothesis = hypotheses.next();
    std::vector<std::string_view> of_segment;
    for (std::size_t i = 0; i < references.size(); ++i) {
      const std::optional<std::string_view> reference = references[i].next();
      if (reference.has_value() != hypothesis.has_value()) {
        const std::string &shorter = reference ? arguments.hypotheses : arguments.references[i],
                          &longer = reference ? arguments.references[i] : arguments.hypotheses;
        fail(ExitCode::kData,
             "{} ends after {}, and {} continues: line i of one belongs to line i of the other",
             shorter, counted(num_segments, "line"), longer);
      }
      if (reference) of_segment.push_back(*reference);
    }
    if (!hypothesis) break;
    check_utf8(*hypothesis, hypotheses.place());
    for (std::size_t i = 0; i < references.size(); ++i)
      check_utf8(of_segment[i], references[i].place());
    counts.add(*hypothesis, of_segment, tokenizer);
    ++num_segments;
  }
  if (num_segments == 0) fail(ExitCode::kData, "{}: holds no lines", arguments.hypotheses);
  const int num_references = static_cast<int>(references.size());
  out << (arguments.json ? json_of(counts, num_references, tokenizer)
                         : bleu_line(counts, num_references, tokenizer))
      << '\n';
  return 0;
}

}  // namespace birkhoff
