#include "launcher/failure.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <new>
#include <system_error>

namespace birkhoff {
namespace {

Failure classify(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return {error.code(), error.what()};
  } catch (const std::bad_alloc&) {
    return {ExitCode::kMemory,
            "out of memory: use a smaller model, train.micro_batch or data.sequence_length"};
  } catch (const c10::OutOfMemoryError& error) {  // of a GPU
    return {ExitCode::kMemory,
            std::string("out of memory: use a smaller model, train.micro_batch or "
                        "data.sequence_length, or train.recompute: ") +
                error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    // LibTorch's CPU allocator has no exception type for this.
    if (what.find("not enough memory") != std::string::npos ||
        what.find("can't allocate memory") != std::string::npos) {
      return {ExitCode::kMemory,
              "out of memory: use a smaller model, train.micro_batch or data.sequence_length"};
    }
    return {ExitCode::kInternal, "internal error in LibTorch: " + what};
  } catch (const std::filesystem::filesystem_error& error) {
    return {ExitCode::kStorage, error.what()};
  } catch (const std::system_error& error) {
    // From std::thread: as with memory, the system has no more to give.
    if (error.code() == std::errc::resource_unavailable_try_again) {
      return {ExitCode::kMemory,
              "out of memory: a thread cannot be started; raise the limits of memory and processes "
              "(ulimit -v, -u)"};
    }
    return {ExitCode::kInternal, std::string("internal error: ") + error.what()};
  } catch (const std::exception& error) {
    return {ExitCode::kInternal, std::string("internal error: ") + error.what()};
  } catch (...) {
    return {ExitCode::kInternal, "internal error: an exception of unknown type"};
  }
}

}  // namespace

std::string one_line(std::string text) {
  const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
  std::replace_if(text.begin(), text.end(), is_control, ' ');
  return text;
}

Failure describe_failure(const std::exception_ptr& exception) {
  Failure failure = classify(exception);
  failure.what = one_line(std::move(failure.what));
  return failure;
}

}  // namespace birkhoff
