// Malformed input of every kind (bad_*_table.cpp): each row must end in one clear line and its
// documented code, and lose no file.
#include "tests/launcher/bad_input/bad_input.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <system_error>

#include "launcher/app.h"
#include "launcher/failure.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

std::vector<BadInput> all_rows() {
  std::vector<BadInput> rows;
  for (auto table :
       {bad_flags, bad_texts, bad_tables, bad_pairs, bad_images, bad_points, bad_config_texts,
        bad_config_values, bad_corpora, bad_manifests, bad_checkpoints, bad_runs, bad_looks,
        bad_decoding, bad_submissions, bad_environments, bad_files}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

// Redirects a descriptor to a file while this object exists.
class Redirected {
 public:
  Redirected(int descriptor, const std::string& file, int flags)
      : descriptor_(descriptor), saved_(dup(descriptor)) {
    const int fd = open(file.c_str(), flags, 0600);
    if (fd < 0 || dup2(fd, descriptor_) < 0) throw std::runtime_error("cannot redirect to " + file);
    close(fd);
  }
  ~Redirected() {
    dup2(saved_, descriptor_);
    close(saved_);
  }
  Redirected(const Redirected&) = delete;
  Redirected& operator=(const Redirected&) = delete;

 private:
  int descriptor_, saved_;
};

// Changes environment variables while this object exists.
class Variables {
 public:
  explicit Variables(const Environment& environment) {
    for (const auto& [name, value] : environment) {
      const char* old = std::getenv(name.c_str());
      old_.emplace_back(name, old != nullptr ? std::optional<std::string>(old) : std::nullopt);
    }
    set(environment);
  }
  ~Variables() { set(old_); }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  static void set(const Environment& environment) {
    for (const auto& [name, value] : environment) {
      if (value) {
        setenv(name.c_str(), value->c_str(), 1);
      } else {
        unsetenv(name.c_str());
      }
    }
  }
  Environment old_;
};

struct Seen {
  int code = -1;
  std::string message;         // what run_app() or the process wrote to err
  std::string other_messages;  // what else was written to standard error
};

class BadInputTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder("birkhoff_bad_input");
    fs::create_directories(folder_->path() / "good");
    make_good_input(folder_->path() / "good");
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }

  // Makes a fresh copy of the good input the working directory, and spoils it.
  static void enter_scratch(const BadInput& row) {
    const fs::path scratch = folder_->path() / "scratch";
    fs::current_path("/");
    fs::remove_all(scratch);
    fs::copy(folder_->path() / "good", scratch, fs::copy_options::recursive);
    // Texts keep their times, because `prepare` identifies texts by them.
    for (const char* text : {"text/one.txt", "text/two.txt"}) {
      fs::last_write_time(scratch / text, fs::last_write_time(folder_->path() / "good" / text));
    }
    fs::current_path(scratch);
    if (row.spoil) row.spoil();
  }

  static std::vector<std::string> arguments_of(const BadInput& row) {
    return row.arguments.empty() ? split_line(row.line) : row.arguments;
  }

  static Seen run_here(const BadInput& row) {
    const Variables variables(row.environment);
    const std::string noise_file = (folder_->path() / "noise").string();
    Seen seen;
    std::ofstream out(row.output.empty() ? "/dev/null" : row.output);
    std::ostringstream err;
    {
      const Redirected input(STDIN_FILENO, row.input, O_RDONLY);
      std::cerr.flush();
      std::fflush(stderr);
      const Redirected errors(STDERR_FILENO, noise_file, O_WRONLY | O_CREAT | O_TRUNC);
      if (row.fault) set_file_fault_hook(row.fault);
      seen.code = run_app(arguments_of(row), out, err);
      set_file_fault_hook({});
      std::fflush(stderr);
    }
    seen.message = err.str();
    seen.other_messages = read_bytes(noise_file);
    return seen;
  }

  static Seen run_process(const BadInput& row) {
    Command command{.line = birkhoff_line(arguments_of(row)),
                    .environment = row.environment,
                    .input = row.input,
                    .output = row.output};
    if (!row.shell.empty()) {
      std::vector<std::string> line = {"/bin/sh", "-c", row.shell + "; exec \"$0\" \"$@\""};
      line.insert(line.end(), command.line.begin(), command.line.end());
      command.line = std::move(line);
    }
    const Finished finished = run_child(command);
    Seen seen{finished.code, finished.err, ""};
    // `train` logs what it does, and reports a checkpoint that it renames, before the error. The
    // error is the last line.
    const std::size_t end_of_log = finished.err.rfind('\n', finished.err.size() - 2);
    if (finished.err.size() > 1 && end_of_log != std::string::npos) {
      seen.other_messages = finished.err.substr(0, end_of_log + 1);
      seen.message = finished.err.substr(end_of_log + 1);
    }
    return seen;
  }

  static void expect_one_clear_line(const BadInput& row, const Seen& seen) {
    EXPECT_EQ(seen.code, static_cast<int>(row.code)) << seen.message;
    ASSERT_FALSE(seen.message.empty());
    EXPECT_EQ(seen.message.find('\n'), seen.message.size() - 1) << "not one line: " << seen.message;
    EXPECT_EQ(seen.message.rfind("birkhoff", 0), 0u) << seen.message;
    EXPECT_LT(seen.message.size(), 1200u) << seen.message;
    for (const char c : seen.message.substr(0, seen.message.size() - 1)) {
      EXPECT_GE(static_cast<unsigned char>(c), 0x20) << "control character: " << seen.message;
    }
    for (const char* trace : {"Exception raised from", "terminate called", "frame #",
                              ".cpp:", "0x7f", "std::", "H5E"}) {
      EXPECT_EQ(seen.message.find(trace), std::string::npos) << trace << ": " << seen.message;
    }
    for (const std::string& word : row.words) {
      EXPECT_NE(seen.message.find(word), std::string::npos)
          << "no '" << word << "' in: " << seen.message;
    }
  }

  static void run(const BadInput& row, bool process) {
    SCOPED_TRACE((process ? "as a process: " : "") + row.name + ": birkhoff " + row.line);
    enter_scratch(row);
    const Tree before = read_tree();
    const Seen seen = process ? run_process(row) : run_here(row);
    expect_one_clear_line(row, seen);
    const bool train = row.line.rfind("train", 0) == 0;
    EXPECT_EQ(lost_files(before, read_tree(), train), "");
    std::istringstream lines(seen.other_messages);
    for (std::string line; std::getline(lines, line);) {
      EXPECT_TRUE(train && process &&
                  (line.find(" rank 0 info: ") != std::string::npos ||
                   line.find(" rank 0 warning: ") != std::string::npos))
          << "noise: " << line;
    }
    if (std::getenv("BIRKHOFF_SHOW") != nullptr)
      std::cout << row.name << "\n  " << seen.code << " " << seen.message;
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

TEST_F(BadInputTest, TableIsLargeAndHasNoRowTwice) {
  std::set<std::string> names, commands;
  int num_processes = 0;
  for (const BadInput& row : all_rows()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_FALSE(row.words.empty()) << row.name;
    if (row.where != Where::kHere) ++num_processes;
    // Rows without damage differ in their command lines.
    const bool plain = !row.spoil && !row.fault && row.environment.empty() &&
                       row.arguments.empty() && row.shell.empty() && row.output.empty();
    if (plain) {
      EXPECT_TRUE(commands.insert(row.line + " < " + row.input).second) << row.line;
    }
  }
  EXPECT_GE(names.size(), 300u);
  EXPECT_GE(num_processes, 30);
  RecordProperty("rows", static_cast<int>(names.size()));
  RecordProperty("processes", num_processes);
}

// The rows are meaningful only if the input is good wherever a row does not spoil it.
TEST_F(BadInputTest, GoodInputIsGood) {
  for (const char* line :
       {"verify corpus", "verify bytes", "verify words", "verify pieces", "verify other",
        "verify labels", "verify run", "eval run --json", "sample run --prompt quick --tokens 5",
        "inspect run", "runs .", "inspect corpus --bigram", "config print good.txtpb",
        "prepare --out corpus2 --tokenizer chars text/one.txt"}) {
    const BadInput row{.name = "good", .line = line};
    enter_scratch(row);
    const Seen seen = run_here(row);
    EXPECT_EQ(seen.code, 0) << line << ": " << seen.message;
    EXPECT_EQ(seen.message, "") << line;
  }
}

TEST_F(BadInputTest, EachRowEndsInOneLineAndItsCode) {
  for (const BadInput& row : all_rows()) {
    if (row.where != Where::kProcess) {
      EXPECT_NO_THROW(run(row, /*process=*/false)) << row.name;
    }
  }
}

TEST_F(BadInputTest, RealProcessesDoTheSame) {
  for (const BadInput& row : all_rows()) {
    if (row.where != Where::kHere) {
      EXPECT_NO_THROW(run(row, /*process=*/true)) << row.name;
    }
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Memory too small for the loader or for LibTorch's initializers, or just enough, never causes an
// abort.
TEST(Failure, ALimitOfMemoryEndsInALineAtAnyPointOfTheStart) {
  for (int limit_kib = 380'000; limit_kib < 500'000; limit_kib += 10'000) {
    const std::string shell = "ulimit -v " + std::to_string(limit_kib) + "; exec \"$0\" \"$@\"";
    const Finished finished =
        run_child({.line = {"/bin/sh", "-c", shell, program_path(), "--version"}});
    constexpr int kLoaderFailed = 127;
    EXPECT_THAT(finished.code, testing::AnyOf(0, kLoaderFailed, 10)) << limit_kib << finished.err;
    if (finished.code == 10) {
      EXPECT_THAT(finished.err, testing::StartsWith("birkhoff: out of memory: "));
      EXPECT_EQ(finished.err.find('\n'), finished.err.size() - 1) << finished.err;
    }
  }
}
#endif

TEST(Failure, AThreadThatCannotBeStartedIsAWantOfMemory) {
  const std::system_error error(std::make_error_code(std::errc::resource_unavailable_try_again));
  const Failure failure = describe_failure(std::make_exception_ptr(error));
  EXPECT_EQ(failure.code, ExitCode::kMemory);
  EXPECT_NE(failure.what.find("ulimit"), std::string::npos) << failure.what;
}

// As LibTorch's allocator for GPUs reports it.
TEST(Failure, TooLittleMemoryOfAGpuHasItsCode) {
  const c10::OutOfMemoryError error({"malloc", "allocator.cpp", 1},
                                    "CUDA out of memory.\nTried to");
  const Failure failure = describe_failure(std::make_exception_ptr(error));
  EXPECT_EQ(failure.code, ExitCode::kMemory);
  EXPECT_NE(failure.what.find("train.micro_batch"), std::string::npos) << failure.what;
  EXPECT_EQ(failure.what.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace birkhoff
