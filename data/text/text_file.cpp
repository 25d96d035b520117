#include "data/text/text_file.h"

#include <fmt/format.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "cluster/base/error.h"
#include "data/text/packed_text.h"

namespace birkhoff {
namespace {

constexpr std::size_t kBufferBytes = 1 << 16;

}  // namespace

// The bytes of the file that were read and not used yet.
struct TextFile::Input {
  File file;
  std::string shown_path, buffer;
  std::size_t at = 0;
  bool ended = false;

  std::string_view rest() const { return std::string_view(buffer).substr(at); }

  // Appends bytes of the file. Returns false at its end.
  bool read_more() {
    if (ended) return false;
    buffer.erase(0, std::exchange(at, 0));
    const std::size_t had = buffer.size();
    buffer.resize(had + kBufferBytes);
    buffer.resize(had + file.read_some(buffer.data() + had, kBufferBytes));
    ended = buffer.size() == had;
    return !ended;
  }

  [[noreturn]] void fail_as_damaged(const char* kind, const std::string& reason) const {
    fail(ExitCode::kData, "{}: damaged {} data: {}; copy or make the file again, or leave it out",
         shown_path, kind, reason);
  }
};

class TextFile::Unpacker {
 public:
  virtual ~Unpacker() = default;
  // As read_some().
  virtual std::size_t read(Input& input, char* out, std::size_t num_bytes) = 0;
};

// Members follow one another, as `cat a.gz b.gz` makes them.
class TextFile::Gzip final : public Unpacker {
 public:
  Gzip() {
    constexpr int kOnlyGzip = 16;
    if (inflateInit2(&stream_, kOnlyGzip + MAX_WBITS) != Z_OK) throw std::bad_alloc();
  }
  ~Gzip() override { inflateEnd(&stream_); }

  std::size_t read(Input& input, char* out, std::size_t num_bytes) override {
    num_bytes = std::min<std::size_t>(num_bytes, 1 << 30);
    stream_.next_out = reinterpret_cast<Bytef*>(out);
    stream_.avail_out = static_cast<uInt>(num_bytes);
    while (stream_.avail_out == num_bytes) {
      if (input.rest().empty() && !input.read_more()) {
        if (between_members_) return 0;
        input.fail_as_damaged("gzip", "it ends early");
      }
      if (between_members_) next_member(input);
      const std::string_view rest = input.rest();
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(rest.data()));
      stream_.avail_in = static_cast<uInt>(rest.size());
      const int status = inflate(&stream_, Z_NO_FLUSH);
      input.at += rest.size() - stream_.avail_in;
      if (status == Z_MEM_ERROR) throw std::bad_alloc();
      between_members_ = status == Z_STREAM_END;
      if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR) {
        input.fail_as_damaged("gzip", stream_.msg != nullptr ? stream_.msg : "not in its format");
      }
    }
    return num_bytes - stream_.avail_out;
  }

 private:
  void next_member(Input& input) {
    while (input.rest().size() < kGzipStart.size() && input.read_more()) {
    }
    if (!input.rest().starts_with(kGzipStart)) {
      input.fail_as_damaged("gzip", "other bytes follow its end");
    }
    inflateReset(&stream_);
    between_members_ = false;
  }

  z_stream stream_{};
  bool between_members_ = false;
};

// Frames follow one another; the library reads them as one.
class TextFile::Zstd final : public Unpacker {
 public:
  Zstd() : stream_(ZSTD_createDStream()) {
    if (stream_ == nullptr) throw std::bad_alloc();
  }
  ~Zstd() override { ZSTD_freeDStream(stream_); }

  std::size_t read(Input& input, char* out, std::size_t num_bytes) override {
    ZSTD_outBuffer to{out, num_bytes, 0};
    while (to.pos == 0) {
      // What the library holds back needs no more input.
      if (input.rest().empty() && !holds_back_ && !input.read_more()) {
        if (between_frames_) return 0;
        input.fail_as_damaged("zstd", "it ends early");
      }
      const std::string_view rest = input.rest();
      ZSTD_inBuffer from{rest.data(), rest.size(), 0};
      const std::size_t status = ZSTD_decompressStream(stream_, &to, &from);
      input.at += from.pos;
      if (ZSTD_getErrorCode(status) == ZSTD_error_frameParameter_windowTooLarge) {
        // The library's limit is 2^ZSTD_WINDOWLOG_LIMIT_DEFAULT bytes.
        fail(ExitCode::kData, "{}: needs more than 128 MiB of memory to unpack; give its text: {}",
             input.shown_path,
             pipe_of({.name = "", .reader = "zstdcat --long=31", .start = ""}, input.shown_path));
      }
      if (ZSTD_isError(status) != 0) input.fail_as_damaged("zstd", ZSTD_getErrorName(status));
      between_frames_ = status == 0;
      holds_back_ = !between_frames_ && to.pos == to.size;
    }
    return to.pos;
  }

 private:
  ZSTD_DStream* stream_;
  bool between_frames_ = false, holds_back_ = false;
};

TextFile::TextFile(File file, std::string shown_path)
    : input_(new Input{std::move(file), std::move(shown_path), {}}) {}

TextFile::~TextFile() = default;
TextFile::TextFile(TextFile&&) noexcept = default;
TextFile& TextFile::operator=(TextFile&&) noexcept = default;

void TextFile::begin() {
  if (std::exchange(has_begun_, true)) return;
  // A pipe may pause after any byte, so none is awaited that could not make a difference.
  const auto begins = [&](std::string_view start) {
    while (true) {
      const std::string_view rest = input_->rest();
      if (rest.size() >= start.size()) return rest.starts_with(start);
      if (!start.starts_with(rest) || !input_->read_more()) return false;
    }
  };
  if (begins(kGzipStart)) unpacker_ = std::make_unique<Gzip>();
  if (begins(kZstdStart)) unpacker_ = std::make_unique<Zstd>();
}

bool TextFile::is_packed() {
  begin();
  return unpacker_ != nullptr;
}

std::size_t TextFile::read_some(char* out, std::size_t num_bytes) {
  begin();
  if (num_bytes == 0) return 0;
  if (unpacker_ != nullptr) return unpacker_->read(*input_, out, num_bytes);
  const std::string_view rest = input_->rest();
  if (rest.empty()) return input_->ended ? 0 : input_->file.read_some(out, num_bytes);
  const std::size_t count = std::min(num_bytes, rest.size());
  std::memcpy(out, rest.data(), count);
  input_->at += count;
  return count;
}

}  // namespace birkhoff
