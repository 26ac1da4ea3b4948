// SPDX-License-Identifier: Apache-2.0
// Verification: is the checkpoint the expected model in the expected layout, and are its bytes intact? verify() runs
// every requested audit in order and reports what it checked. It implements `reshard verify`.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/audit/file_sums.h"
#include "lib/audit/finding.h"
#include "lib/audit/values.h"
#include "lib/checkpoint/format.h"
#include "lib/engine/run.h"
#include "lib/model/model.h"

namespace reshard {

struct VerifyOptions {
  std::string path;
  ModelChoice model;
  std::string config;  // the config.json to check against; empty: the one next to it, if any

  std::optional<LayoutDescriptor> source_layout;  // how per-rank files join
  KeyChanges keys;                                // of the checkpoint that is verified
  Weights weights = Weights::kModel;              // weights of the checkpoint that is verified
  std::optional<LayoutDescriptor> layout;         // expected layout; needs a mesh unless tensors are stored whole
  std::optional<Mesh> mesh;                       // without a layout: the mesh that saved it
  std::string against;                            // another checkpoint of the same model; empty: none

  // Whether to read all data and verify checksums and digests, to judge values as well, or to compare every stored copy
  // as well. If no check at all is requested, `bytes` is the default.
  bool bytes = false, values = false, replicas = false;
  bool file_sums = false;  // also compute the SHA-256 of each file, which reads them once more
  bool exponents = false;  // with `values`: count elements by their exponents

  RunOptions run;                  // its `progress` is not called
  std::string spool = "/tmp";      // as in Reader::locate
  SameValue same_value = nullptr;  // as in ComparisonOptions
  // Called with the number of bytes before they are read; its result is called with the bytes read so far.
  std::function<std::function<void(Index bytes)>(Index bytes)> watch;

  bool asks_for_data() const { return bytes || values || replicas; }
  bool asks_for_nothing() const { return !asks_for_data() && config.empty() && !layout && !mesh && against.empty(); }
};

struct VerifiedTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  Digest digest;
  struct Other {  // the tensor of that name in the other checkpoint
    DType dtype = DType::kFloat32;
    Digest digest;
    bool equal = false;  // to this one's elements, in the dtype of the Comparison
  };
  std::optional<Other> against;
};

struct VerifyReport {
  const Format* format = nullptr;
  Model model;  // the model that the tensors were checked against
  Index tensor_count = 0, tensor_bytes = 0;
  bool read_data = false;                                  // more than metadata and headers
  bool is_partial = false;                                 // with read_data: only what can be read
  std::vector<std::pair<std::string, std::string>> facts;  // a label, which may be empty, and a clause
  std::vector<Finding> findings;                           // by severity
  std::vector<CheckRun> checks;                            // in the order in which they ran
  std::vector<VerifiedTensor> tensors;  // those that were read; with another checkpoint, those in both
  std::vector<ValueRow> values;         // if requested
  std::vector<FileSum> files;           // if requested

  void checked(std::string id, std::string title, Index looked_at);
  void skipped(std::string id, std::string title, std::string why);
  void fact(std::string label, std::string text);
  // The reference is valid until the next finding.
  Finding& add(Severity severity, std::string id, std::string what);
  // Adds a message of several lines: the first becomes `what`, the others `why`.
  Finding& add_message(std::string id, const std::string& message);
  void add(std::vector<Finding> more);
};

// Fails if there is nothing to audit: the path cannot be opened even as metadata, or the request makes no sense for it.
// Problems of the checkpoint are findings.
Result<VerifyReport> verify(const Opener& open, const VerifyOptions& options);

}  // namespace reshard
