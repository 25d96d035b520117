// Pipes, sockets, devices and folders in place of a file: reading them would wait forever or never
// end.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

void make_fifo(const std::string& path) {
  fs::remove_all(path);
  if (mkfifo(path.c_str(), 0600) != 0) throw std::runtime_error("mkfifo " + path);
}

// Makes a pipe whose other end is open but never written.
void make_silent_pipe(const std::string& path) {
  make_fifo(path);
  if (open(path.c_str(), O_RDWR | O_CLOEXEC) < 0) throw std::runtime_error("open " + path);
}

void make_socket(const std::string& path) {
  fs::remove_all(path);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    throw std::runtime_error("bind " + path);
  }
}

// Makes a file that never ends.
void make_device(const std::string& path) {
  fs::remove_all(path);
  fs::create_symlink("/dev/zero", path);
}

void make_folder(const std::string& path) {
  fs::remove_all(path);
  fs::create_directories(path);
}

using Make = void (*)(const std::string&);

// Replaces `path` with something else.
BadInput file(const std::string& what, Make make, const std::string& path, std::string line,
              ExitCode code, std::vector<std::string> words) {
  words.push_back(fs::path(path).filename());
  return {.name = "file: " + what + " as " + path + ": " + line,
          .line = std::move(line),
          .code = code,
          .words = std::move(words),
          .spoil = [=] { make(path); }};
}

std::vector<BadInput> configurations() {
  using enum ExitCode;
  const std::string train = "train x.txtpb --run new";
  BadInput included = file("a FIFO", make_fifo, "x.txtpb", "config print outer.txtpb", kConfig,
                           {"include", "is not a regular file"});
  included.spoil = [spoil = included.spoil] {
    spoil();
    write_bytes("outer.txtpb", "include: \"x.txtpb\"\n");
  };
  return {
      included,
      as_process(file("a FIFO", make_fifo, "x.txtpb", train, kConfig, {"had no writer", "5 s"})),
      as_process(file("a FIFO", make_fifo, "x.txtpb", train + " --ranks 2", kConfig,
                      {"had no writer", "5 s"})),
      file("a silent pipe", make_silent_pipe, "x.txtpb", "config print x.txtpb", kConfig,
           {"delivered nothing for 5 s"}),
      file("a socket", make_socket, "x.txtpb", train, kConfig, {"is not a regular file"}),
      file("a device", make_device, "x.txtpb", train, kConfig, {"is not a regular file"}),
      file("a device", make_device, "x.txtpb", "config diff good.txtpb x.txtpb", kConfig,
           {"is not a regular file"}),
  };
}

std::vector<BadInput> inputs() {
  using enum ExitCode;
  const std::string tokenizer = "prepare --out new --tokenizer model text";
  const std::string text = "prepare --out new --tokenizer chars input";
  return {
      file("a FIFO", make_fifo, "model", tokenizer, kData, {"is a FIFO, not a regular file"}),
      file("a socket", make_socket, "model", tokenizer, kData, {"not a socket"}),
      file("a device", make_device, "model", tokenizer, kData, {"is a device, not a regular file"}),
      file("a folder", make_folder, "model", tokenizer, kData, {"is a folder", "--like model"}),
      file("a FIFO", make_fifo, "input", text, kData, {"had no writer", "5 s"}),
      file("a socket", make_socket, "input", text, kData, {"not a socket"}),
      file("a device", make_device, "input", text, kData, {"is a device", "or a pipe"}),
  };
}

std::vector<BadInput> corpora() {
  using enum ExitCode;
  const std::string train = "train good.txtpb --run new";
  const std::string manifest = "corpus/manifest.json", model = "corpus/tokenizer.chars";
  const std::string shard = "corpus/valid-tokens-00000.h5";
  std::vector<BadInput> rows;
  for (const auto& [what, make, word] :
       {std::tuple<const char*, Make, const char*>("a FIFO", make_fifo, "is a FIFO"),
        {"a socket", make_socket, "not a socket"},
        {"a device", make_device, "is a device"},
        {"a folder", make_folder, "Is a directory"}}) {
    rows.push_back(file(what, make, manifest, train, kData, {word}));
    rows.push_back(file(what, make, manifest, "inspect corpus", kData, {word}));
    rows.push_back(file(what, make, model, "verify corpus", kData, {word}));
    rows.push_back(file(what, make, shard, "verify corpus", kData, {}));
  }
  return rows;
}

std::vector<BadInput> runs() {
  using enum ExitCode;
  const std::string step = "run/checkpoints/step-00000004";
  const std::string resume = "train good.txtpb --run run --set train.steps=6";
  return {
      file("a FIFO", make_fifo, step + "/manifest.json", "eval " + step, kData, {"is a FIFO"}),
      file("a device", make_device, step + "/manifest.json", "inspect " + step, kData,
           {"is a device"}),
      as_process(file("a FIFO", make_fifo, "run/run.json", resume, kCheckpoint, {"is a FIFO"})),
      as_process(
          file("a device", make_device, "run/run.json", resume, kCheckpoint, {"is a device"})),
      as_process(file("a FIFO", make_fifo, "run/metrics.jsonl", resume, kStorage, {"is a FIFO"})),
      as_process(file("a FIFO", make_fifo, "run/log/rank-0.log", resume, kStorage,
                      {"No such device", "pipe"})),
      as_process(file("a silent pipe", make_silent_pipe, "run/log/rank-0.log", resume, kStorage,
                      {"is a FIFO", "remove it"})),
  };
}

}  // namespace

std::vector<BadInput> bad_files() {
  std::vector<BadInput> rows;
  for (auto table : {configurations, inputs, corpora, runs}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
