// Runs that cannot be examined: inspect, runs, compare, analyse. Problems that transport refuses.
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

BadInput look(std::string line, ExitCode code, std::vector<std::string> words,
              std::function<void()> spoil = {}, std::string name = "") {
  return {.name = name.empty() ? line : line + ": " + name,
          .line = std::move(line),
          .code = code,
          .words = std::move(words),
          .spoil = std::move(spoil)};
}

void copy_run() { fs::copy("run", "run2", fs::copy_options::recursive); }

// Copies the run to run2, then replaces its metrics.jsonl.
std::function<void()> metrics(const std::string& text) {
  return [text] {
    copy_run();
    write_bytes("run/metrics.jsonl", text);
  };
}

std::vector<BadInput> of_runs() {
  using enum ExitCode;
  return {
      look("runs", kUsage, {"DIR", "required"}),
      look("runs run text", kUsage, {"text"}),
      look("runs --jsn .", kUsage, {"did you mean '--json'"}),
      look("runs ''", kUsage, {"no such folder"}),
      as_process_too(look("runs nowhere", kUsage, {"nowhere", "no such folder"})),
      look("runs good.txtpb", kUsage, {"good.txtpb", "no such folder"}),
      look("runs text", kUsage, {"text", "no run folder", "run.json"}),
      look("runs loop", kUsage, {"loop", "no run folder"},
           [] {
             fs::create_directories("loop/a");
             fs::create_directory_symlink("..", "loop/a/up");
             fs::create_directory_symlink("nowhere", "loop/a/dangling");
           }),
      look("runs deep", kUsage, {"deep", "no run folder"},
           [] {
             fs::create_directories("deep/1/2/3/4/5/6/7/8");
             fs::rename("run", "deep/1/2/3/4/5/6/7/8/run");
           }),
      look("run", kUsage, {"unknown command 'run'", "did you mean 'runs'"}),
  };
}

std::vector<BadInput> of_compare() {
  using enum ExitCode;
  return {
      look("compare", kUsage, {"RUN", "required"}),
      look("compare run", kUsage, {"at least two runs", "birkhoff inspect"}),
      look("compare run run", kUsage, {"run", "given twice"}),
      look("compare run ./run/", kUsage, {"./run/", "given twice"}),
      look("compare run link", kUsage, {"link", "given twice"},
           [] { fs::create_directory_symlink("run", "link"); }),
      as_process_too(look("compare run nowhere", kUsage, {"nowhere", "no such folder"})),
      look("compare run text", kUsage, {"text", "neither"}),
      look("compare run corpus", kUsage, {"corpus", "is not a run folder"}),
      look("compare run run/checkpoints/step-00000004", kUsage,
           {"step-00000004", "is not a run folder"}),
      look("compare run good.txtpb", kUsage, {"good.txtpb", "neither"}),
      look("compare run run2 --svg", kUsage, {"--svg"}, copy_run),
      look("compare run run2 --png a.png", kUsage, {"--png"}, copy_run),
      look("compare run run2 --svg ''", kUsage, {"--svg", "names no file"}, copy_run),
      as_process_too(look("compare run run2 --svg nowhere/c.svg", kStorage,
                          {"nowhere", "No such file"}, copy_run)),
      look("compare run run2 --svg text", kStorage, {"text", "directory"}, copy_run),
      look("compare run run2 --svg /proc/c.svg", kStorage, {"/proc/c.svg"}, copy_run),
      look("compare run run2", kStorage, {"run/metrics.jsonl:2: not a line of metrics"},
           metrics("{\"step\":1,\"loss\":2}\n{\"step\":1,\"loss\":NaN}\n"), "NaN in metrics"),
      look("compare run2 run", kStorage, {"run/metrics.jsonl:1: not a line of metrics"},
           metrics(std::string(100000, 'x')), "a line without an end"),
      look(
          "compare run run2", kConfig, {"run2/config.txtpb", "No such file"},
          [] {
            copy_run();
            remove_one("run2/config.txtpb");
          },
          "a configuration that is gone"),
      look(
          "compare run run2", kConfig, {"run2/config.txtpb:1:1", "byte 0xff"},
          [] {
            copy_run();
            write_bytes("run2/config.txtpb", "\xff\xfe");
          },
          "a configuration in UTF-16"),
      {.name = "compare of a name with an escape sequence",
       .code = kUsage,
       .words = {"no such folder"},
       .arguments = {"compare", "run", "\x1b[31mred"}},
  };
}

std::vector<BadInput> of_inspect() {
  using enum ExitCode;
  return {
      look("inspect run", kStorage, {"run/metrics.jsonl:1: not a line of metrics"},
           metrics("[1, 2]\n"), "a list in metrics"),
      look("inspect run", kStorage, {"run/metrics.jsonl:3", "repair or remove the file"},
           metrics("{\"step\":1}\n{\"step\":2}\n{\"loss\":2}\n{\"step\":3}\n"), "no step"),
      look(
          "inspect run", kConfig, {"run/config.txtpb", "train.steps", "is -1"},
          [] { replace_text("run/config.txtpb", "steps: 4", "steps: -1"); }, "steps below 1"),
      look(
          "inspect run", kConfig, {"run/config.txtpb", "'010' starts with a zero"},
          [] { replace_text("run/config.txtpb", "steps: 4", "steps: 010"); }, "octal steps"),
      look(
          "verify run", kCheckpoint, {"run", "holds no checkpoint yet"},
          [] { remove_one("run/checkpoints"); }, "before its first checkpoint"),
      look(
          "eval run", kCheckpoint, {"run", "holds no checkpoint yet"},
          [] { remove_one("run/checkpoints"); }, "before its first checkpoint"),
  };
}

std::vector<BadInput> of_analyse() {
  using enum ExitCode;
  return {
      look("analyse", kUsage, {"RUN", "required"}),
      look("analyse run", kUsage, {"--text", "required"}),
      look("analyze run --text text/one.txt", kUsage, {"did you mean 'analyse'"}),
      as_process_too(look("analyse nowhere --text text/one.txt", kUsage, {"no such folder"})),
      look("analyse corpus --text text/one.txt", kUsage, {"is a corpus"}),
      look("analyse run --text nowhere", kUsage, {"nowhere", "No such file"}),
      look("analyse run --text text/one.txt --layers 1", kUsage,
           {"--layers 1", "the model has 1 layer, from 0 to 0"}),
      look("analyse run --text text/one.txt --heads 0,2", kUsage,
           {"--heads 2", "the model has 2 heads, from 0 to 1"}),
      look("analyse run --text text/one.txt --heads -1", kUsage, {"--heads"}),
      look("analyse run --text text/one.txt --tokens 33", kUsage,
           {"--tokens 33", "data.sequence_length = 32"}),
      look(
          "analyse run --text short --tokens 20", kData, {"--text short", "6 tokens", "than 20"},
          [] { write_bytes("short", "matrix"); }, "of a short text"),
      look(
          "analyse run --text short", kData, {"--text short", "1 token", "than 2"},
          [] { write_bytes("short", "m"); }, "of one token"),
      look(
          "analyse run --text binary", kData, {"--text binary", "byte 1 is not UTF-8"},
          [] { write_bytes("binary", "m\xff"); }, "of bytes"),
      look("analyse run --text text/one.txt --html ''", kUsage, {"--html", "names no file"}),
      look("analyse run --text text/one.txt --html nowhere/p", kStorage, {"No such file"}),
      look(
          "analyse run --text text/one.txt", kCheckpoint, {"holds no checkpoint"},
          [] { remove_one("run/checkpoints"); }, "before its first checkpoint"),
  };
}

std::vector<BadInput> of_transport() {
  using enum ExitCode;
  const auto with_file = [](const std::string& text, std::vector<std::string> words,
                            const std::string& options = "") {
    return look(
        "transport --cost cost" + options, kData, std::move(words),
        [text] { write_bytes("cost", text); }, "of " + text + options);
  };
  const std::string masses = " --source source --target target";
  const auto with_masses = [&](const std::string& source, const std::string& target,
                               std::vector<std::string> words) {
    BadInput row = with_file("1 2\n3 4\n", std::move(words), masses);
    row.name += source + target;
    row.spoil = [source, target, before = row.spoil] {
      before();
      write_bytes("source", source);
      write_bytes("target", target);
    };
    return row;
  };
  return {
      look("transport", kUsage, {"give one problem", "--example"}),
      look("transport --example factories --cost cost", kUsage, {"give only one problem"}),
      look("transport --example charmin", kUsage, {"charmin", "factories"}),
      look("transport --from a", kUsage, {"--from", "--to"}),
      look("transport --example sorting --source text", kUsage, {"--source", "--example"}),
      look("transport --example factories --reg 0", kUsage, {"regularization is 0"}),
      look("transport --example factories --reg nan", kUsage, {"regularization is nan"}),
      look("transport --example factories --tolerance -1", kUsage, {"tolerance is -1"}),
      look("transport --example factories --reg 1e-20", kUsage, {"use a larger regularization"}),
      as_process_too(look("transport --example factories --iterations 9", kNumerical,
                          {"stopped after 9 iterations", "--tolerance 1e-06", "--eps-scaling"})),
      look("transport --cost nowhere", kUsage, {"nowhere", "No such file"}),
      look("transport --cost text", kUsage, {"text"}),
      look("transport --example factories --plan nowhere/p", kStorage, {"nowhere", "No such file"}),
      with_file("", {"cost: holds no numbers"}),
      with_file("1 2\n3 nan\n", {"cost:2", "'nan' is not a finite number"}),
      with_file("1 2\n-inf 4\n", {"cost:2", "'-inf'"}),
      with_file("1,2\n3,\n", {"cost:2", "'' is not a finite number"}),
      with_file("1e999\n", {"cost:1", "'1e999'"}),
      with_file("a,b\n1,2\n", {"cost:1", "'a'", "without a header"}),
      with_file("1 2\n3\n", {"cost:2", "the line has 1 number", "2 each"}),
      with_masses("1 1", "1 2", {"add up to 2", "to 3"}),
      with_masses("1 -1", "0 0", {"source mass 2 of 2 is -1"}),
      with_masses("1 1", "nan 1", {"target:1", "'nan'"}),
      with_masses("1 1 1", "1 2", {"source: holds 3 masses for 2 sources"}),
      with_masses("1 2\n3 4", "1 2", {"source: holds 2 x 2 numbers"}),
      with_masses("0 0", "0 0", {"the total of the source masses is 0"}),
  };
}

std::vector<BadInput> faults() {
  using enum ExitCode;
  const auto fault = [](const std::string& line, const std::string& call, const std::string& part,
                        int error, std::vector<std::string> words) {
    BadInput row{.name = "fault: " + line + ": " + call + " of " + part,
                 .line = line,
                 .code = kStorage,
                 .words = std::move(words),
                 .spoil = copy_run};
    row.fault = [=](const char* name, const std::string& path, std::int64_t) {
      return name == call && path.find(part) != std::string::npos ? error : 0;
    };
    return row;
  };
  return {
      fault("inspect run", "read", "metrics.jsonl", EIO, {"Input/output error", "metrics.jsonl"}),
      fault("inspect run", "open", "run/lock", EACCES, {"Permission denied", "run/lock"}),
      fault("inspect run", "flock", "run/lock", EIO, {"run/lock"}),
      fault("compare run run2", "write", "compare.svg", ENOSPC, {"No space left", "compare.svg"}),
      fault("compare run run2", "open", "run2/metrics.jsonl", EACCES, {"Permission denied"}),
  };
}

}  // namespace

std::vector<BadInput> bad_looks() {
  std::vector<BadInput> rows;
  for (auto table : {of_runs, of_compare, of_inspect, of_analyse, of_transport, faults}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
