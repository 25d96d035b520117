#pragma once

namespace birkhoff {

// Whether a sanitizer runs with this program: it is slower then, and needs more address space.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace birkhoff
