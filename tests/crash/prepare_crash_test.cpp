// Cuts birkhoff prepare at every call. Whatever the machine then loses of its page cache, the same
// command makes exactly the corpus of an undisturbed command, and a corpus that was reported as
// ready is complete without it. BIRKHOFF_CRASH_STATES sets the approximate number of states, over
// all inputs and tests.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "cluster/base/files/file.h"
#include "data/corpus/corpus.h"
#include "data/corpus/verify.h"
#include "data/prepare/prepare.h"
#include "tests/crash/crash_trial.h"
#include "tests/data/helpers.h"
#include "tests/data/prepare_helpers.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kReady = 1;

// The input of prepare: documents, or standard input.
struct Input {
  std::string tokenizer;
  bool from_stdin = false;
};

void PrintTo(const Input& input, std::ostream* out) { *out << input.tokenizer; }

// While an object exists, standard input is a pipe with `text` (less than a pipe's capacity).
class StandardInput {
 public:
  explicit StandardInput(const std::string& text) : saved_(::dup(STDIN_FILENO)) {
    int ends[2];
    if (::pipe(ends) != 0 ||
        ::write(ends[1], text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
      throw std::runtime_error("no pipe for standard input");
    }
    ::close(ends[1]);
    ::dup2(ends[0], STDIN_FILENO);
    ::close(ends[0]);
  }
  ~StandardInput() {
    ::dup2(saved_, STDIN_FILENO);
    ::close(saved_);
  }
  StandardInput(const StandardInput&) = delete;
  StandardInput& operator=(const StandardInput&) = delete;

 private:
  const int saved_;
};

class PrepareCrash : public testing::TestWithParam<Input> {
 protected:
  PrepareCrash() {
    write_text(in() + "/a", sentences(8, 1));
    write_text(in() + "/b", sentences(8, 2));
    input_ = content_of(in());
    const TestFolder undisturbed;
    prepare(undisturbed);
    verify_corpus(Corpus(undisturbed.path() / "corpus"));
    expected_ = content_of(undisturbed.path() / "corpus");
  }

  // Makes root/corpus.
  void prepare(const fs::path& root) const {
    PrepareOptions options =
        prepare_options((root / "corpus").string(), {in()}, GetParam().tokenizer);
    options.shard_tokens = 100;
    if (GetParam().from_stdin) {
      options.paths = {"-"};
      const StandardInput standard_input(sentences(14, 3));
      prepare_corpus(options);
    } else {
      prepare_corpus(options);
    }
    mark_io(kReady);
  }

  // Checks the corpus after a crash. mark: whether it was reported as ready (kReady) or not (0).
  std::string is_or_becomes_whole(const fs::path& root, std::int64_t mark) const {
    const fs::path corpus = root / "corpus";
    const bool looks_whole = fs::exists(corpus / "manifest.json");
    if (mark == kReady && !looks_whole) return "was reported as ready and has no manifest";
    if (looks_whole) {
      const auto content = content_of(corpus.string());
      for (const auto& [name, bytes] : expected_) {
        const auto found = content.find(name);
        if (found == content.end()) return "there is a manifest, but no " + name;
        if (found->second != bytes) return "there is a manifest, but a different " + name;
      }
    }
    prepare(root);
    if (content_of(corpus.string()) != expected_) {
      std::string names;
      for (const std::string& name : list_directory(corpus.string())) names += " " + name;
      return "the corpus made again differs; it holds" + names;
    }
    return content_of(in()) == input_ ? "" : "the input was changed";
  }

  CrashTrial::Check check() const {
    return [this](const fs::path& root, const CrashState& state) {
      return is_or_becomes_whole(root, state.mark);
    };
  }
  std::string name(const std::string& suffix) const {
    return fmt::format("crash states of prepare, {}{}{}", GetParam().tokenizer,
                       GetParam().from_stdin ? " from standard input" : "", suffix);
  }

  std::string in() const { return (elsewhere_.path() / "in").string(); }

 private:
  const TestFolder elsewhere_;
  std::map<std::string, std::string> input_, expected_;
};

// The number of states for one of three inputs.
std::size_t num_states() { return num_crash_states(180) / 3; }

TEST_P(PrepareCrash, TheCorpusIsWholeOrMadeAnew) {
  const TestFolder root;
  const IoTrace trace = record_io(root, [&] { prepare(root); });
  CrashTrial trial(name(""), check());
  trial.run(trace, crash_states(trace, num_states() / 2));
}

// The same command crashes again.
TEST_P(PrepareCrash, AlsoAfterTheNextCrash) {
  const TestFolder root;
  const IoTrace first = record_io(root, [&] { prepare(root); });
  const auto states = crash_states(first, SIZE_MAX);
  const std::size_t num_first = num_states() / 20;
  CrashTrial trial(name(", after a crash"), check());
  for (const std::size_t i : evenly_spaced(num_first, states.size())) {
    const TestFolder again;
    write_tree(states[i].tree, again);
    const IoTrace second = record_io(again, [&] { prepare(again); });
    trial.run(second, crash_states(second, num_states() / 3 / num_first));
  }
}

// A different command crashed first and left other names and contents.
TEST_P(PrepareCrash, AlsoWhereAnotherCommandCrashed) {
  const TestFolder root;
  const IoTrace first = record_io(root, [&] {
    PrepareOptions options = prepare_options((root.path() / "corpus").string(), {in()}, "chars");
    options.shard_tokens = 70;
    prepare_corpus(options);
  });
  auto states = crash_states(first, SIZE_MAX);
  std::erase_if(states, [](const CrashState& state) {
    return state.tree.contains("corpus/manifest.json");  // another corpus, which is not replaced
  });
  const std::size_t num_first = num_states() / 20;
  CrashTrial trial(name(", after a crash of another command"), check());
  for (const std::size_t i : evenly_spaced(num_first, states.size())) {
    const TestFolder again;
    write_tree(states[i].tree, again);
    const IoTrace second = record_io(again, [&] { prepare(again); });
    trial.run(second, crash_states(second, num_states() / 3 / num_first));
  }
}

// The first command is killed, the second reports the corpus as ready, then the machine stops. The
// report must not rely on data that the first command left unsynced.
TEST_P(PrepareCrash, AlsoAfterAKill) {
  const TestFolder root;
  const IoTrace killed = record_io(root, [&] { prepare(root); });
  CrashTrial trial(name(", after a kill"), check());
  for (const std::size_t cut : kill_points(killed, num_states() / 6)) {
    const TestFolder again;
    const IoTrace both = record_after_kill(killed, cut, again, [&] { prepare(again); });
    trial.run(both, crash_states(both, SIZE_MAX, /*seed=*/1, first_promise(both, cut)));
  }
}

INSTANTIATE_TEST_SUITE_P(Inputs, PrepareCrash,
                         testing::Values(Input{"chars"}, Input{"bytes"}, Input{"words", true}),
                         [](const auto& input) { return input.param.tokenizer; });

}  // namespace
}  // namespace birkhoff
