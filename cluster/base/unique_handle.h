// Sole owner of a C handle (file descriptor, CUDA event, MPI communicator, ...).
#pragma once

#include <utility>

namespace birkhoff {

// Traits: `using Handle = ...; static Handle null(); static void close(Handle) noexcept;`
// The destructor closes the handle and ignores errors. Where closing can lose data, call release(),
// close the handle and check the result.
template <typename Traits>
class UniqueHandle {
 public:
  using Handle = typename Traits::Handle;

  UniqueHandle() = default;
  explicit UniqueHandle(Handle handle) : handle_(handle) {}
  UniqueHandle(UniqueHandle&& other) noexcept : handle_(other.release()) {}
  UniqueHandle& operator=(UniqueHandle&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~UniqueHandle() { reset(); }

  Handle get() const { return handle_; }
  explicit operator bool() const { return handle_ != Traits::null(); }
  // Gives up the handle; the caller closes it.
  Handle release() { return std::exchange(handle_, Traits::null()); }
  void reset(Handle handle = Traits::null()) {
    const Handle old = std::exchange(handle_, handle);
    if (old != Traits::null()) Traits::close(old);
  }

 private:
  Handle handle_ = Traits::null();
};

}  // namespace birkhoff
