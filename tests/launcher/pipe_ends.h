// The other ends of a program's descriptors: a reader of its pipe, a user at its terminal.
#pragma once

#include <functional>
#include <string>

namespace birkhoff {

// Returns false if the condition does not become true in two minutes.
bool wait_until(const std::function<bool()>& condition);

// A named pipe, for a Command's input or output.
class NamedPipe {
 public:
  explicit NamedPipe(std::string path);
  ~NamedPipe();
  NamedPipe(const NamedPipe&) = delete;
  NamedPipe& operator=(const NamedPipe&) = delete;

  const std::string& path() const { return path_; }
  // Call one of these once the program is started; it waits until the program opens its end.
  void open_for_read();
  void open_for_write();
  // The next bytes, at least one; empty at the end, or if none come in two minutes.
  std::string read_some() const;
  void write_all(const std::string& bytes) const;
  // Whether all written bytes have been read.
  bool is_empty() const;
  void close();

 private:
  const std::string path_;
  int descriptor_ = -1;
};

// A terminal: its path for a Command's output or errors, and the text written to it.
class Terminal {
 public:
  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  const std::string& path() const { return path_; }
  // Reads until no program has it open, or two minutes have passed.
  std::string read_all() const;

 private:
  int descriptor_ = -1;
  std::string path_;
};

}  // namespace birkhoff
