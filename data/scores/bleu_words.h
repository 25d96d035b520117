// The words that BLEU compares: the tokenizers `13a` and `intl` of sacreBLEU (Post 2018, "A Call
// for Clarity in Reporting BLEU Scores"), which follow NIST's scripts mteval-v13a and mteval-v14
// with --international-tokenization, and `none`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace birkhoff {

enum class BleuTokenizer { kNone, k13a, kIntl };

// "none", "13a" or "intl". Error(kUsage) for any other name.
BleuTokenizer bleu_tokenizer(const std::string& name);
std::string bleu_tokenizer_name(BleuTokenizer tokenizer);

// The words of a segment: a line of UTF-8 without its line feed. White space, which separates
// words, is what Unicode calls so and the four ASCII separators 0x1c to 0x1f.
//   13a: &quot; &amp; &lt; and &gt; become characters and <skipped> is removed. ASCII punctuation
//     is a word of its own, except: apostrophes; periods and commas between digits; hyphens that
//     follow no digit.
//   intl: punctuation is separated except between two numbers, and each symbol is a word; numbers,
//     punctuation and symbols are the Unicode categories N, P and S. Punctuation that ends the
//     segment after a number has no second neighbor, and stays.
// Each rule looks at the text from left to right and once at each character, as mteval's regular
// expressions do. So of two periods after a letter only the first is separated.
std::vector<std::string> bleu_words(std::string_view segment, BleuTokenizer tokenizer);

}  // namespace birkhoff
