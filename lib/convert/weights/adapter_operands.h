// SPDX-License-Identifier: Apache-2.0
// The tensors of an adapter and what each of them is, by its name: a matrix of a pair, a whole weight, or rows of an
// embedding (adapter.h lists the names).
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "lib/checkpoint/catalog.h"
#include "lib/convert/view/request.h"
#include "lib/convert/weights/fused_parameters.h"

namespace reshard {

// The parsed key of an adapter's tensor.
struct AdapterOperand {
  enum class Kind { kA, kB, kWhole, kRows, kUnknown } kind = Kind::kUnknown;
  // The module of a pair or of rows ("model.layers.0.self_attn.q_proj"), otherwise the weight ("lm_head.weight").
  std::string of;
  bool is_embeddings = false;

  bool is_of_pair() const { return kind == Kind::kA || kind == Kind::kB; }
};
AdapterOperand adapter_operand(std::string_view key);

// Two matrices whose product is added to a module's weight, or to a fused parameter of it.
struct AdapterPair {
  std::optional<std::size_t> a, b;  // in the adapter's catalog
  bool is_embeddings = false;
  const FusedParameter* fused = nullptr;  // the parameter it changes, if that is not a module's weight
  bool is_input_first = false;            // the rows of the fused parameter are inputs

  // Returns what the pair of `module` changes: the module, or the fused parameter's name.
  std::string changes(const std::string& module) const;
};

// The numbers of the tensors, in the adapter's catalog.
struct AdapterOperands {
  std::map<std::string, AdapterPair> pairs;                 // by the module
  std::map<std::string, std::optional<std::size_t>> whole;  // by the weight
  std::map<std::string, std::optional<std::size_t>> rows;   // by the module

  // Returns the entry for a tensor.
  std::optional<std::size_t>& slot_of(const AdapterOperand& operand);
};

// Finds an adapter's tensors in a catalog: all that `selection` does not exclude if the adapter `is_separate`,
// otherwise those that `selection` includes and whose names are an adapter's. Refers to its arguments.
class AdapterTensors {
 public:
  AdapterTensors(const Catalog& catalog, bool is_separate, const Selection& selection);

  bool is_own(const Tensor& t) const;
  // Returns whether there is anything other than whole weights.
  bool is_there() const;
  // Returns whether the checkpoint has weights as well, so that the adapter's names begin with kAdapterPrefix.
  bool is_beside_weights() const { return is_beside_weights_; }
  // Fails (unsupported) for a tensor that is nothing of the above, and for two adapters of one layer; (corrupt) if one
  // matrix of a pair is missing, or the ranks of the two differ.
  Result<AdapterOperands> operands() const;
  // Returns the error for a tensor that is not understood; `why` is "" or ends with "; ".
  Error unknown(const Tensor& t, const std::string& why) const;

 private:
  const Catalog& catalog_;
  bool is_separate_;
  const Selection& selection_;
  bool is_beside_weights_;
};

}  // namespace reshard
