// Runs a plan: slab by slab, on several threads, within a given amount of memory.
//
// A slab is a box of one tensor, about a megabyte, row-major in memory. It is read from wherever its elements lie,
// checked and digested while it is in cache, converted if asked, and written to wherever its elements go. Every element
// passes once. Verifying is the same walk with nothing to write.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "lib/engine/run_options.h"
#include "lib/engine/walk.h"
#include "lib/output/output.h"
#include "lib/plan/plan.h"
#include "lib/source/tensor_source.h"

namespace reshard {

// The same for copy_tensors() with these arguments.
Result<MemoryPlan> copy_memory(const Plan& plan, const Catalog& source, const Catalog& target,
                               const RunOptions& options);

// The source tensors named by `plan`, to where `target` (a view of the output's catalog) says, further copies included.
// One proof for each planned tensor.
Result<std::vector<TensorProof>> copy_tensors(const Plan& plan, TensorSource& source, const Catalog& target,
                                              Output& output, const RunOptions& options);

// Reads tensors without writing anything. `as` gives the dtype each is converted to before its target digest is taken.
// `visit`, if given, is called with (request number, box, elements) while the box's elements, converted, are in cache;
// from several threads. Of several ranks one visits all of a tensor.
struct DigestRequest {
  std::size_t tensor = 0;
  DType as = DType::kFloat32;
};
using BoxVisit = std::function<void(std::size_t request, const Box& box, Bytes elements)>;
Result<std::vector<TensorProof>> digest_tensors(const std::vector<DigestRequest>& requests, TensorSource& source,
                                                const RunOptions& options, const BoxVisit& visit = nullptr);

// The same walk over two sources at once: calls visit(request number, box, a, b) with the elements of both, each in its
// own dtype. For comparing. The sources' tensors agree in shape. Visits come from several threads; of several ranks
// each visits its share of the boxes.
struct PairRequest {
  std::size_t a = 0;
  std::size_t b = 0;
  std::optional<Box> box = std::nullopt;  // the part of the two that is wanted; nothing: all of it
};
using PairVisit = std::function<void(std::size_t request, const Box& box, Bytes a, Bytes b)>;
Status visit_pairs(const std::vector<PairRequest>& requests, TensorSource& a, TensorSource& b,
                   const RunOptions& options, const PairVisit& visit);

}  // namespace reshard
