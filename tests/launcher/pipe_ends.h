// What the other end of a program's descriptors sees: a reader of its pipe, a user at its terminal.
#pragma once

#include <functional>
#include <string>

namespace birkhoff {

// False if it does not come true in two minutes.
bool wait_until(const std::function<bool()>& condition);

// A named pipe, for a Command's input or output.
class NamedPipe {
 public:
  explicit NamedPipe(std::string path);
  ~NamedPipe();
  NamedPipe(const NamedPipe&) = delete;
  NamedPipe& operator=(const NamedPipe&) = delete;

  const std::string& path() const { return path_; }
  // One of them, once the program is started: waits for it to open its end.
  void open_for_read();
  void open_for_write();
  // The next bytes, at least one; empty at the end, or if none come in two minutes.
  std::string read_some() const;
  void write_all(const std::string& bytes) const;
  // Whether everything that was written has been read.
  bool is_empty() const;
  void close();

 private:
  const std::string path_;
  int descriptor_ = -1;
};

// A terminal: its path for a Command's output or errors, and what was written there so far.
class Terminal {
 public:
  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  const std::string& path() const { return path_; }
  // Until no program has it open, or two minutes have passed.
  std::string read_all() const;

 private:
  int descriptor_ = -1;
  std::string path_;
};

}  // namespace birkhoff
