// Numbers as text for people and other programs, and numbers in such text.
#pragma once

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace birkhoff {

// Reads the whole text as a number, as std::from_chars does; nullopt if it is not a number or does
// not fit the type. format: the base of an integer, or the std::chars_format of a float.
template <typename Number, typename... Format>
std::optional<Number> parse_number(std::string_view text, Format... format) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, format...);
  return error == std::errc() && rest == end ? std::optional(number) : std::nullopt;
}

// The value with that many decimals. A NaN is "nan" whatever its sign, which has no meaning.
inline std::string fixed_text(double value, int decimals) {
  return std::isnan(value) ? "nan" : fmt::format("{:.{}f}", value, decimals);
}

// The fewest digits that read back as the same value of the same type, without an exponent from
// 1e-15 up to 1e21: "0.0004", "12", "2.5". A float prints its own digits, not those of the double
// it converts to.
template <typename Float>
std::string plain_text(Float value) {
  if (std::isnan(value)) return "nan";
  const double size = std::abs(static_cast<double>(value));
  const bool plain = size == 0 || (size >= 1e-15 && size < 1e21);
  std::array<char, 64> digits{};
  const auto end = std::to_chars(digits.begin(), digits.end(), value,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific);
  return std::string(digits.begin(), end.ptr);
}

}  // namespace birkhoff
