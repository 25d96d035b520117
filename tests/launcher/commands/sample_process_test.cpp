// `sample` and `eval` as users run them: with pipes, terminals, Ctrl-C, and readers that leave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"
#include "tests/launcher/pipe_ends.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::StartsWith;

// The working directory holds the good input and `bytes_run`, which generates bytes of every value.
class SampleProcess : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    setenv("OMP_NUM_THREADS", "1", 1);
    folder_ = new TemporaryFolder("birkhoff_sample");
    make_good_input(folder_->path());
    fs::current_path(folder_->path());
    const Finished trained =
        run_child({.line = birkhoff_line({"train", "good.txtpb", "--run", "bytes_run", "--set",
                                          "data.corpus=bytes", "--set", "train.steps=1"})});
    ASSERT_EQ(trained.code, 0) << trained.err;
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }

  static Command sample(const std::string& run, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"sample", run};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return {.line = birkhoff_line(arguments)};
  }
  static std::string sampled(const std::string& run, const std::vector<std::string>& more,
                             const std::string& input = "/dev/null") {
    Command command = sample(run, more);
    command.input = input;
    const Finished finished = run_child(command);
    EXPECT_EQ(finished.code, 0) << finished.err;
    EXPECT_EQ(finished.err, "");
    return finished.out;
  }

  static bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

  static inline TemporaryFolder* folder_ = nullptr;
};

// Far more tokens than any test waits for: all output arrives before the end.
const std::vector<std::string> kEndless = {"--prompt", "quick ", "--tokens", "10000000"};

TEST_F(SampleProcess, TextComesAsItIsDrawnUntilTheReaderLeaves) {
  for (const char* signal_of_the_pipe : {"--default-signal=PIPE", "--ignore-signal=PIPE"}) {
    SCOPED_TRACE(signal_of_the_pipe);
    NamedPipe pipe("pipe");
    Command command = sample("run", kEndless);
    command.line.insert(command.line.begin(), {"env", signal_of_the_pipe});
    command.output = pipe.path();
    Child child(command);
    pipe.open_for_read();
    std::string text;
    while (text.size() < 100) {
      const std::string part = pipe.read_some();
      ASSERT_FALSE(part.empty()) << "nothing comes";
      text += part;
    }
    EXPECT_TRUE(child.is_running());
    EXPECT_THAT(text, StartsWith("quick "));
    pipe.close();
    const Finished finished = child.finish();
    EXPECT_EQ(finished.code, 128 + SIGPIPE);
    EXPECT_EQ(finished.err, "");
  }
}

TEST_F(SampleProcess, CtrlCKeepsWhatWasDrawn) {
  Command command = sample("run", kEndless);
  command.output = "drawn.txt";
  Child child(command);
  ASSERT_TRUE(wait_until([] {
    return fs::exists("drawn.txt") && fs::file_size("drawn.txt") >= 100;
  })) << "nothing comes";
  child.signal(SIGINT);
  const Finished finished = child.finish();
  EXPECT_EQ(finished.code, 128 + SIGINT);
  EXPECT_EQ(finished.err, "");
  EXPECT_THAT(finished.out, StartsWith("quick "));
  EXPECT_GE(finished.out.size(), 100u);
  EXPECT_EQ(finished.out.back(), '\n');
  const std::string drawn = finished.out.substr(0, finished.out.size() - 1);
  const std::string more = std::to_string(drawn.size());
  EXPECT_THAT(sampled("run", {"--prompt", "quick ", "--tokens", more}), StartsWith(drawn));
}

TEST_F(SampleProcess, AFullDiskEndsItAtOnce) {
  Command command = sample("run", kEndless);
  command.output = "/dev/full";
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 6);
  EXPECT_THAT(finished.err, HasSubstr("standard output cannot be written: No space left"));
}

// Text i does not depend on the number of texts, and the texts differ.
TEST_F(SampleProcess, SeveralTexts) {
  const std::vector<std::string> line = {"--prompt", "quick ", "--tokens", "40"};
  const auto texts = [&](const char* number) {
    std::vector<std::string> more = line;
    more.insert(more.end(), {"--samples", number});
    return sampled("run", more);
  };
  const std::string between = "---------------\n";
  const std::string one = texts("1"), two = texts("2"), three = texts("3");
  EXPECT_EQ(one, sampled("run", line));
  EXPECT_THAT(two, StartsWith(one + between + "quick "));
  EXPECT_THAT(three, StartsWith(two + between + "quick "));
  EXPECT_EQ(three.find(between, two.size() + between.size()), std::string::npos);
  const std::size_t size = one.size();
  EXPECT_EQ(three.size(), 3 * size + 2 * between.size());
  EXPECT_NE(two.substr(size + between.size()), one);
  EXPECT_NE(three.substr(2 * (size + between.size())), two.substr(size + between.size()));
}

TEST_F(SampleProcess, ThePromptComesFromAFileOrStandardInputAsItIs) {
  const std::string prompt = "block sorts\nevery query\n";
  write_bytes("prompt.txt", prompt);
  const std::string text = sampled("run", {"--prompt", prompt, "--tokens", "30"});
  EXPECT_THAT(text, StartsWith(prompt));
  EXPECT_EQ(sampled("run", {"--prompt-file", "prompt.txt", "--tokens", "30"}), text);
  EXPECT_EQ(sampled("run", {"--prompt-file", "-", "--tokens", "30"}, "prompt.txt"), text);
  NamedPipe pipe("pipe");
  Command command = sample("run", {"--prompt-file", "-", "--tokens", "30"});
  command.input = pipe.path();
  Child child(command);
  pipe.open_for_write();
  pipe.write_all(prompt);
  pipe.close();
  EXPECT_EQ(child.finish().out, text);
}

// Lines of words as documents, with an end mark.
TEST_F(SampleProcess, ATextEndsWithItsDocument) {
  const auto done = [](const std::vector<std::string>& arguments) {
    const Finished finished = run_child({.line = birkhoff_line(arguments)});
    EXPECT_EQ(finished.code, 0) << finished.err;
    return finished;
  };
  done({"prepare", "--out", "lines", "--lines", "--tokenizer", "words", "text/one.txt"});
  done({"train", "good.txtpb", "--run", "lines_run", "--set", "data.corpus=lines"});
  std::string word;
  std::istringstream(read_bytes("text/one.txt")) >> word;
  // A hardly trained model draws all tokens about equally often, and so the end mark.
  const std::string text = sampled("lines_run", {"--prompt", word, "--tokens", "1000000"});
  EXPECT_THAT(text, StartsWith(word));
  EXPECT_LT(text.size(), 1'000'000u);
  // A word's token begins with the space before it.
  EXPECT_THAT(done({"sample", "lines_run", "--prompt", word + " "}).err,
              HasSubstr("the prompt ends in a space"));
  EXPECT_EQ(done({"sample", "lines_run", "--prompt", word}).err, "");
  EXPECT_EQ(done({"sample", "run", "--prompt", "quick "}).err, "") << "characters are tokens";
}

TEST_F(SampleProcess, TopPLeavesTheLikeliest) {
  const auto text = [](const std::vector<std::string>& more) {
    std::vector<std::string> line = {"--prompt", "quick ", "--tokens", "40"};
    line.insert(line.end(), more.begin(), more.end());
    return sampled("run", line);
  };
  EXPECT_EQ(text({"--top-p", "1e-9"}), text({"--temperature", "0"}));
  EXPECT_EQ(text({"--top-p", "1"}), text({}));
  EXPECT_NE(text({"--top-p", "0.5"}), text({}));
}

// A model can generate any byte, including those that a terminal obeys.
TEST_F(SampleProcess, ATerminalGetsNoControlCharacters) {
  const std::vector<std::string> line = {"--prompt", "a\x1b[31m", "--tokens", "3000"};
  const std::string raw = sampled("bytes_run", line);
  EXPECT_EQ(raw.size(), 6 + 3000 + 1u) << "a pipe gets every byte";
  EXPECT_GT(std::count_if(raw.begin(), raw.end(), is_control), 100);
  const Terminal terminal;
  Command command = sample("bytes_run", line);
  command.output = terminal.path();
  Child child(command);
  const std::string shown = terminal.read_all();
  EXPECT_EQ(child.finish().code, 0);
  EXPECT_THAT(shown, StartsWith("a\\x1b[31m"));
  EXPECT_THAT(shown, HasSubstr("\\x07"));
  EXPECT_THAT(shown, HasSubstr("\\xff"));
  for (const char c : shown) {
    EXPECT_TRUE(!is_control(c) || c == '\n' || c == '\r' || c == '\t') << static_cast<int>(c);
  }
}

TEST_F(SampleProcess, EvalShowsProgressOnATerminal) {
  const Terminal terminal;
  Command command{.line = birkhoff_line({"eval", "run"})};
  command.errors = terminal.path();
  Child child(command);
  const std::string shown = terminal.read_all();
  const Finished finished = child.finish();
  EXPECT_EQ(finished.code, 0);
  EXPECT_THAT(shown, HasSubstr("\r\x1b[K\x1b[?7leval: valid, 16 of "));
  EXPECT_THAT(shown, HasSubstr(" left"));
  EXPECT_THAT(shown, testing::EndsWith("\r\x1b[K")) << "nothing is left";
  EXPECT_THAT(finished.out, HasSubstr("nats per token"));
}

TEST_F(SampleProcess, EvalReportsPerplexityOfTheSequencesAskedFor) {
  const auto eval = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"eval", "run", "--json"});
    const Finished finished = run_child({.line = birkhoff_line(arguments)});
    EXPECT_EQ(finished.code, 0) << finished.err;
    EXPECT_EQ(finished.err, "");
    return nlohmann::json::parse(finished.out);
  };
  const auto all = eval({}), zero = eval({"--sequences", "0"}),
             many = eval({"--sequences", "9999"});
  EXPECT_EQ(all, zero);
  EXPECT_EQ(all, many);
  const auto three = eval({"--sequences", "3"});
  EXPECT_EQ(three["sequences"], 3);
  EXPECT_EQ(three["tokens"], 3 * 32);
  EXPECT_GT(all["sequences"], 40);
  for (const auto& figures : {all, three}) {
    const double loss = figures["loss"], tokens = figures["tokens"], bytes = figures["bytes"];
    EXPECT_DOUBLE_EQ(figures["perplexity"], std::exp(loss));
    EXPECT_NEAR(figures["bits_per_byte"], loss * tokens / bytes / std::log(2), 1e-9);
    const double words = figures["words"], line_ends = figures["line_ends"];
    EXPECT_NEAR(std::log(figures["word_perplexity"].get<double>()), loss * tokens / words, 1e-9);
    EXPECT_NEAR(std::log(figures["word_and_line_perplexity"].get<double>()),
                loss * tokens / (words + line_ends), 1e-9);
    EXPECT_EQ(figures["unknown_tokens"], 0);
    EXPECT_FALSE(figures.contains("withheld"));
  }
  // The words of the text's valid split: the text was cut into splits of 20 and 10 per cent.
  const std::string text = read_bytes("text/one.txt");
  const auto size = static_cast<double>(text.size());
  const std::string valid = text.substr(static_cast<std::size_t>(std::floor(0.7 * size)),
                                        static_cast<std::size_t>(std::floor(0.2 * size)));
  // Characters: the first one is no target, and each stands for its bytes.
  const auto words_of = [&](std::size_t end) {
    std::istringstream words(valid.substr(0, end));
    return static_cast<double>(std::distance(std::istream_iterator<std::string>(words), {})) - 1;
  };
  EXPECT_NEAR(all["words"], words_of(valid.size()), 1);
  EXPECT_NEAR(three["words"], words_of(97), 1);
  EXPECT_EQ(three["line_ends"], std::count(valid.begin() + 1, valid.begin() + 97, '\n'));

  const Finished printed = run_child({.line = birkhoff_line({"eval", "run", "--sequences", "3"})});
  EXPECT_THAT(printed.out, HasSubstr(" perplexity "));
  EXPECT_THAT(printed.out, HasSubstr(" per token, "));
  EXPECT_THAT(printed.out,
              HasSubstr(" per word and line end, 96 tokens, 0 of them unknown (0 %), "));
  EXPECT_THAT(printed.out, HasSubstr("3 of " + all["sequences"].dump() + " sequences"));
}

std::string eval_json(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"eval", "run", "--json"});
  const Finished finished = run_child({.line = birkhoff_line(arguments)});
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.err, "");
  return finished.out;
}

TEST_F(SampleProcess, EvalPrintsTheSameFiguresOnAnyNumberOfRanks) {
  for (const char* split : {"valid", "test"}) {
    const std::string alone = eval_json({"--split", split});
    EXPECT_EQ(nlohmann::json::parse(alone)["step"], 4);
    for (const char* ranks : {"1", "2", "3"}) {
      EXPECT_EQ(eval_json({"--split", split, "--ranks", ranks}), alone) << ranks << " ranks";
    }
  }
}

// top_m is not a field of the model that was trained; its figure appears with it.
TEST_F(SampleProcess, EvalTakesEvaluationTimeFields) {
  const std::string field = "model.attention.0.group.0.mechanism.sinkhorn.top_m=";
  const std::string figure = "blocks.0.attention.groups.0.block_weight_dropped";
  const auto trained = nlohmann::json::parse(eval_json({}));
  EXPECT_FALSE(trained.contains(figure));
  const std::string text = eval_json({"--set", field + "1"});
  const auto cut = nlohmann::json::parse(text);
  EXPECT_NE(cut["loss"], trained["loss"]);
  EXPECT_GT(cut[figure].get<double>(), 0.1);
  EXPECT_LT(cut[figure].get<double>(), 0.9);
  EXPECT_EQ(eval_json({"--set", field + "1", "--ranks", "2"}), text);
}

}  // namespace
}  // namespace birkhoff
