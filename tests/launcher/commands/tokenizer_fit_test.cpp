// Text for an existing model: prepare --like, --tokenizer FILE, eval --corpus and --text. Also
// checks that the commands which error messages suggest do work.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <thread>

#include "cluster/base/files/file.h"
#include "data/corpus/corpus.h"
#include "data/corpus/verify.h"
#include "launcher/app.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  int code = -1;
  std::string out, err;
};

// Runs in this process; `line` is for split_line(), without "birkhoff".
Outcome run(const std::string& line) {
  std::ostringstream out, err;
  Outcome outcome;
  outcome.code = run_app(split_line(line), out, err);
  outcome.out = out.str();
  outcome.err = err.str();
  return outcome;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

class TokenizerFit : public testing::Test {
 protected:
  // Models of characters (run/), of bytes of several documents and of one: 257 and 256 ids.
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder("birkhoff_tokenizer_fit");
    make_good_input(folder_->path());
    fs::current_path(folder_->path());
    ASSERT_EQ(run("prepare --out two text").code, 0);
    for (const std::string corpus : {"two", "bytes", "words", "pieces"}) {
      const Finished trained = run_child(
          {.line = birkhoff_line({"train", "good.txtpb", "--run", "run-" + corpus, "--set",
                                  "data.corpus=" + corpus, "--set", "train.steps=2"})});
      ASSERT_EQ(trained.code, 0) << trained.err;
    }
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }
  void TearDown() override { fs::remove_all("new"); }

  static nlohmann::json evaluated(const std::string& arguments) {
    const Outcome outcome = run("eval " + arguments + " --json");
    EXPECT_EQ(outcome.code, 0) << arguments << ": " << outcome.err;
    return outcome.code == 0 ? nlohmann::json::parse(outcome.out) : nlohmann::json();
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

TEST_F(TokenizerFit, WhatARefusalSaysCanBeRun) {
  // Pairs of a run and a corpus with another tokenizer, with more ids, and with the same kind but
  // other words.
  ASSERT_EQ(run("prepare --out words2 --tokenizer words text/two.txt").code, 0);
  for (const auto& [model, corpus] :
       std::vector<std::pair<std::string, std::string>>{{"run", "bytes"},
                                                        {"run-bytes", "two"},
                                                        {"run-bytes", "corpus"},
                                                        {"run-two", "words"},
                                                        {"run-words", "words2"},
                                                        {"run-pieces", "corpus"}}) {
    SCOPED_TRACE(model + " on " + corpus);
    const Outcome refused = run("eval " + model + " --corpus " + corpus);
    EXPECT_EQ(refused.code, 4);
    std::smatch cure;
    for (const std::regex& command :
         {std::regex("birkhoff (prepare [^;]*);"), std::regex("birkhoff (eval [^;\n]*)\n")}) {
      ASSERT_TRUE(std::regex_search(refused.err, cure, command)) << refused.err;
      const Outcome cured =
          run(replaced(replaced(cure[1].str(), "NEW", "new"), "TEXT", "text/one.txt"));
      EXPECT_EQ(cured.code, 0) << cure[1] << ": " << cured.err;
    }
    EXPECT_GT(evaluated(model + " --corpus new")["tokens"], 100);
    fs::remove_all("new");
  }
}

// A model with 257 ids accepts a corpus with 256, which lacks only the end-of-document id.
TEST_F(TokenizerFit, ACorpusMayLackTheMark) {
  EXPECT_EQ(Corpus("two").vocabulary(), 257);
  EXPECT_EQ(Corpus("bytes").vocabulary(), 256);
  EXPECT_GT(evaluated("run-two --corpus bytes")["tokens"], 100);
  const Outcome refused = run("eval run-bytes --corpus two");
  EXPECT_EQ(refused.code, 4);
  EXPECT_NE(refused.err.find("end in id 256"), std::string::npos) << refused.err;
}

TEST_F(TokenizerFit, LikeTakesTheTokenizerOfEverything) {
  for (const std::string like :
       {"corpus", "bytes", "words", "pieces", "two", "run", "run-two", "run-bytes", "run-words",
        "run-pieces", "run/checkpoints/step-00000004"}) {
    for (const std::string text : {"text", "text/two.txt"}) {
      SCOPED_TRACE(like + ", " + text);
      const Outcome prepared = run("prepare --out new --like " + like + " " + text);
      ASSERT_EQ(prepared.code, 0) << prepared.err;
      EXPECT_EQ(run("prepare --out new --like " + like + " " + text).code, 0) << "again";
      const Corpus corpus("new");
      verify_corpus(corpus);
      if (like.starts_with("run")) {
        EXPECT_GT(evaluated(like.substr(0, like.find('/')) + " --corpus new")["tokens"], 100);
      } else {
        const auto had = Corpus(like).manifest().tokenizer();
        EXPECT_EQ(corpus.vocabulary(), had.vocabulary());
        EXPECT_EQ(corpus.manifest().tokenizer().hash(), had.hash());
        EXPECT_EQ(corpus.manifest().tokenizer().has_end_of_document(),
                  had.has_end_of_document() && text == "text");
      }
      fs::remove_all("new");
    }
  }
}

TEST_F(TokenizerFit, TokenizerTakesEveryFile) {
  for (const std::string file :
       {"corpus/tokenizer.chars", "words/tokenizer.words", "pieces/tokenizer.model",
        "run-words/checkpoints/step-00000002/tokenizer.words"}) {
    SCOPED_TRACE(file);
    const Outcome prepared = run("prepare --out new --tokenizer " + file + " text");
    ASSERT_EQ(prepared.code, 0) << prepared.err;
    const Corpus corpus("new"), first(fs::path(file).begin()->string().substr(0, 3) == "run"
                                          ? fs::path("words")
                                          : fs::path(file).parent_path());
    const auto& tokenizer = corpus.manifest().tokenizer();
    EXPECT_EQ(tokenizer.hash(), first.manifest().tokenizer().hash());
    const bool own_mark = tokenizer.kind() == "sentencepiece";
    EXPECT_EQ(corpus.vocabulary(), first.vocabulary() + (own_mark ? 0 : 1));
    EXPECT_EQ(tokenizer.end_of_document(), own_mark ? 1 : first.vocabulary());
    verify_corpus(corpus);
    fs::remove_all("new");
  }
}

// Raw text has the same results as a corpus of it, from a file or standard input.
TEST_F(TokenizerFit, TextIsEvaluatedAsACorpusOfIt) {
  for (const std::string model : {"run", "run-two", "run-bytes", "run-words", "run-pieces"}) {
    SCOPED_TRACE(model);
    ASSERT_EQ(
        run("prepare --out new --like " + model + " --train text/one.txt --valid text/two.txt")
            .code,
        0);
    const auto corpus = evaluated(model + " --corpus new");
    auto text = evaluated(model + " --text text/two.txt");
    EXPECT_EQ(text["text"], "text/two.txt");
    const Finished piped = run_child(
        {.line = birkhoff_line({"eval", model, "--text", "-", "--json"}), .input = "text/two.txt"});
    ASSERT_EQ(piped.code, 0) << piped.err;
    const auto from_pipe = nlohmann::json::parse(piped.out);
    for (const char* figure : {"tokens", "bytes"}) {
      EXPECT_EQ(text[figure], corpus[figure]) << figure;
      EXPECT_EQ(from_pipe[figure], corpus[figure]) << figure;
    }
    EXPECT_EQ(text["loss"], corpus["loss"]);
    EXPECT_NEAR(from_pipe["loss"].get<double>(), corpus["loss"].get<double>(), 1e-4);
    fs::remove_all("new");
  }
}

// The corpus that eval makes of a text disappears with the process, whatever ends it.
TEST_F(TokenizerFit, NothingIsLeftOfAText) {
  fs::create_directory("scratch");
  const std::string scratch = fs::absolute("scratch").string();
  const auto command = [&](const std::string& text) {
    return Command{.line = birkhoff_line({"eval", "run", "--text", text}),
                   .environment = {{"TMPDIR", scratch}}};
  };
  EXPECT_EQ(run_child(command("text/one.txt")).code, 0);
  EXPECT_TRUE(fs::is_empty("scratch"));
  write_bytes("capitals.txt", "CAPITALS");
  EXPECT_EQ(run_child(command("capitals.txt")).code, 4);
  EXPECT_TRUE(fs::is_empty("scratch"));
  ASSERT_EQ(mkfifo("pipe", 0600), 0);
  const UniqueHandle<FileDescriptorTraits> never_ends(open("pipe", O_RDWR | O_CLOEXEC));
  for (const int signal : {SIGINT, SIGTERM, SIGKILL}) {
    Command endless = command("-");
    endless.input = "pipe";
    Child child(endless);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    const auto wait_until = [&](const auto& condition) {
      while (!condition() && std::chrono::steady_clock::now() < limit)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_TRUE(condition()) << "signal " << signal;
    };
    const auto corpus_begins = [&] {
      for (const auto& entry : fs::directory_iterator("scratch")) {
        if (fs::exists(entry.path() / "corpus/.unfinished")) return true;
      }
      return false;
    };
    wait_until(corpus_begins);
    child.signal(signal);
    EXPECT_EQ(child.finish().code, 128 + signal);
    wait_until([] { return fs::is_empty("scratch"); });
  }
}

}  // namespace
}  // namespace birkhoff
