#include "attention/key_value_cache.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace birkhoff {
namespace {

constexpr std::int64_t kFirstCapacity = 64;

// Returns a cache with room for `capacity` tokens like `token`, and with the first `size` tokens of
// `cache`.
at::Tensor grown(const at::Tensor& cache, std::int64_t size, std::int64_t capacity,
                 const at::Tensor& token) {
  at::Tensor larger =
      at::empty({token.size(0), token.size(1), capacity, token.size(3)}, token.options());
  if (size > 0) larger.narrow(2, 0, size).copy_(cache.narrow(2, 0, size));
  return larger;
}

}  // namespace

void KeyValueCache::append(const at::Tensor& k_BH1D, const at::Tensor& v_BH1D) {
  if (!keys_BHSD_.defined() || size_ == keys_BHSD_.size(2)) {
    const std::int64_t capacity = std::max(kFirstCapacity, 2 * size_);
    keys_BHSD_ = grown(keys_BHSD_, size_, capacity, k_BH1D);
    values_BHSD_ = grown(values_BHSD_, size_, capacity, v_BH1D);
  }
  keys_BHSD_.narrow(2, size_, 1).copy_(k_BH1D);
  values_BHSD_.narrow(2, size_, 1).copy_(v_BH1D);
  ++size_;
}

at::Tensor KeyValueCache::keys(std::int64_t first, std::int64_t last) const {
  return keys_BHSD_.narrow(2, first, last - first);
}

at::Tensor KeyValueCache::values(std::int64_t first, std::int64_t last) const {
  return values_BHSD_.narrow(2, first, last - first);
}

void KeyValueCache::select_rows(const at::Tensor& rows_B) {
  if (size_ == 0) return;
  keys_BHSD_ = keys_BHSD_.index_select(0, rows_B);
  values_BHSD_ = values_BHSD_.index_select(0, rows_B);
}

}  // namespace birkhoff
