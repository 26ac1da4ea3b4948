// SPDX-License-Identifier: Apache-2.0
// Runs a plan: slab by slab, on several threads, within a given amount of memory.
//
// A slab (slabs.h) is a box of one tensor of about a megabyte. It is read from all the places where its elements are
// stored, checked and digested while it is in cache, converted if asked, and written to all the places where its
// elements go. Every element is processed once. Verifying is the same walk without writing.
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

// Plans the memory of copy_tensors() with these arguments, as plan_memory() does.
Result<MemoryPlan> copy_memory(const Plan& plan, const Catalog& source, const Catalog& target,
                               const RunOptions& options);

// Copies the source tensors of `plan` to the places, replicas included, that `target` (a view of the output's catalog)
// gives them. Returns one proof for each planned tensor.
Result<std::vector<TensorProof>> copy_tensors(const Plan& plan, TensorSource& source, const Catalog& target,
                                              Output& output, const RunOptions& options);

// Reads tensors and computes their digests without writing anything. `as` is the dtype that each is converted to before
// its target digest is computed. `visit`, if given, is called with (request number, box, converted elements) while the
// elements are in cache, from several threads. If there are several ranks, one of them visits all of a tensor.
struct DigestRequest {
  std::size_t tensor = 0;
  DType as = DType::kFloat32;
};
using BoxVisit = std::function<void(std::size_t request, const Box& box, Bytes elements)>;
Result<std::vector<TensorProof>> digest_tensors(const std::vector<DigestRequest>& requests, TensorSource& source,
                                                const RunOptions& options, const BoxVisit& visit = nullptr);

// Reads two sources at once, to compare them: calls visit(request number, box, a, b) with the elements of both, each in
// its own dtype. The tensors of a pair must have the same shape. Calls come from several threads; if there are several
// ranks, each visits its share of the boxes.
struct PairRequest {
  std::size_t a = 0;
  std::size_t b = 0;
  std::optional<Box> box = std::nullopt;  // the part to compare; nothing: all of it
};
using PairVisit = std::function<void(std::size_t request, const Box& box, Bytes a, Bytes b)>;
Status visit_pairs(const std::vector<PairRequest>& requests, TensorSource& a, TensorSource& b,
                   const RunOptions& options, const PairVisit& visit);

}  // namespace reshard
