// SPDX-License-Identifier: Apache-2.0
// The source of a conversion with its packed weights (lib/model/quantization.h) as ordinary ones: a catalog in which
// each has one tensor, computed as it is read, so that names, shapes, rows and adapters are those of a plain model.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/convert/view/conversion_notes.h"
#include "lib/convert/view/request.h"
#include "lib/convert/view/source_view.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/model/config.h"
#include "lib/source/computed_source.h"

namespace reshard {

class Unpacking {
 public:
  // Opens the packed weights of a source. Returns null if there are none that can be unpacked, or if `wanted` does not
  // ask for it (--dtype with 2 bytes or more). Replaces `config` with that of the plain model. Reads small tensors.
  // Errors: a usage error if an adapter is to be merged without --dtype, or if --keep-dtype keeps only some weights
  // packed; corrupt for a weight that is incomplete or contradicts itself; unsupported for a layout that cannot be
  // unpacked.
  static Result<std::unique_ptr<Unpacking>> make(Reader& source, const Request& wanted, int threads, ConfigFile& config,
                                                 ConversionNotes& notes);

  // The plain model. Its computed tensors are recorded as stored in a file that does not exist, row-major, one after
  // the other, so that a view can rename them and cut and reorder their rows like any others.
  const Catalog& catalog() const { return catalog_; }
  // Returns the source's tensors that the given tensors of catalog() are read from.
  std::vector<std::size_t> operands(const std::vector<std::size_t>& tensors) const;
  // Copies the locations of the source's tensors after it has located them.
  void update(const Catalog& source);

  // Marks the tensors of a view that are computed (SourceView::computed).
  void note_computed(SourceView& view) const;
  // Sets how the unpacked tensors of `computed` are filled. `packed` reads the source's tensors, `stored` the other
  // rows of a view, such as padding. All of them must outlive `computed`.
  void set(TensorSource& packed, TensorSource& stored, ComputedSource& computed) const;
  Index worker_bytes() const { return worker_bytes_; }

 private:
  struct Weight {
    std::unique_ptr<PackedMatrix> matrix;
    DType dtype = DType::kFloat32;
    Index offset = 0;  // in the file that does not exist
  };

  Unpacking() = default;
  Status add(Tensor like, std::unique_ptr<PackedMatrix> matrix, std::vector<std::size_t> parts, DType dtype);
  const Weight& at(Index offset) const;
  bool is_unpacked(const Tensor& tensor) const;  // at least partly
  Status fill(TensorSource& packed, TensorSource& stored, const Tensor& tensor, std::size_t number, const Box& box,
              MutableBytes out, MutableBytes scratch) const;
  Status fill_fragment(TensorSource& packed, const Tensor& tensor, const Fragment& fragment, const Box& part,
                       const Box& box, MutableBytes out, MutableBytes scratch) const;

  Catalog catalog_;
  std::uint32_t file_ = 0;                         // of catalog_, that does not exist
  std::vector<Weight> weights_;                    // by offset
  std::vector<std::vector<std::size_t>> sources_;  // of each tensor of catalog_
  std::vector<bool> is_computed_;                  // whether each tensor of catalog_ is computed
  Index worker_bytes_ = 0;
};

// Returns the number of elements that packed weights of the reader's catalog have together once they are unpacked;
// nothing if that of one is unknown. Reads the small tensors in which 4-bit weights of bitsandbytes record their
// shapes. `spool` is as in Reader::locate.
Result<std::optional<Index>> count_unpacked(Reader& reader, const std::vector<const PackedWeight*>& weights,
                                            const std::string& spool);

}  // namespace reshard
