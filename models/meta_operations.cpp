#include "models/meta_operations.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace birkhoff {
namespace {

at::Tensor like(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

at::Tensor& unary_out(const at::Tensor& x, at::Tensor& out) {
  out.resize_(x.sizes());
  return out;
}

at::Tensor& binary_out(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  out.resize_(at::infer_size(a.sizes(), b.sizes()));
  return out;
}

at::Tensor logcumsumexp(const at::Tensor& x, std::int64_t /*dim*/) { return like(x); }

at::DimVector where_sizes(const at::Tensor& condition, const at::Tensor& a, const at::Tensor& b) {
  return at::infer_size_dimvector(condition.sizes(),
                                  at::infer_size_dimvector(a.sizes(), b.sizes()));
}

at::Tensor choose(const at::Tensor& condition, const at::Tensor& a, const at::Tensor& b) {
  return at::empty(where_sizes(condition, a, b), a.options().dtype(at::result_type(a, b)));
}

at::Tensor& choose_out(const at::Tensor& condition, const at::Tensor& a, const at::Tensor& b,
                       at::Tensor& out) {
  out.resize_(where_sizes(condition, a, b));
  return out;
}

at::Tensor select_index(const at::Tensor& x, std::int64_t dim, const at::Tensor& index) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  if (!sizes.empty())
    sizes[static_cast<std::size_t>(at::maybe_wrap_dim(dim, x.dim()))] = index.numel();
  return at::empty(sizes, x.options());
}

// Output, mean and inverse standard deviation.
std::tuple<at::Tensor, at::Tensor, at::Tensor> normalize(
    const at::Tensor& x, at::IntArrayRef normalized, const std::optional<at::Tensor>& /*weight*/,
    const std::optional<at::Tensor>& /*bias*/, double /*epsilon*/) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  std::fill(sizes.end() - static_cast<std::ptrdiff_t>(normalized.size()), sizes.end(), 1);
  return {like(x), at::empty(sizes, x.options()), at::empty(sizes, x.options())};
}

at::Tensor embedding_gradient(const at::Tensor& gradient, const at::Tensor& /*ids*/,
                              std::int64_t num_rows, std::int64_t /*padding*/, bool /*scale*/) {
  return at::empty({num_rows, gradient.size(-1)}, gradient.options());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> normalize_backward(
    const at::Tensor& /*gradient*/, const at::Tensor& x, at::IntArrayRef /*normalized*/,
    const at::Tensor& /*mean*/, const at::Tensor& /*deviation*/,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    std::array<bool, 3> needed) {
  return {needed[0] ? like(x) : at::Tensor(), needed[1] ? like(*weight) : at::Tensor(),
          needed[2] ? like(*bias) : at::Tensor()};
}

}  // namespace

MetaOperations::MetaOperations()
    : library_(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__) {
  library_.impl("relu", &like);
  library_.impl("_logcumsumexp", &logcumsumexp);
  library_.impl("abs.out", &unary_out);
  library_.impl("logical_not.out", &unary_out);
  library_.impl("logical_and.out", &binary_out);
  library_.impl("logical_or.out", &binary_out);
  library_.impl("where.self", &choose);
  library_.impl("where.self_out", &choose_out);
  library_.impl("index_select", &select_index);
  library_.impl("embedding_dense_backward", &embedding_gradient);
  library_.impl("native_layer_norm", &normalize);
  library_.impl("native_layer_norm_backward", &normalize_backward);
}

}  // namespace birkhoff
