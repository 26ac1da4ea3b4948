// The source of a conversion with its packed weights (lib/model/quantization.h) as ordinary ones: a catalog in which
// each has one tensor, computed as it is read, so that names, shapes, rows and adapters are those of a plain model.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/convert/notes.h"
#include "lib/convert/options.h"
#include "lib/convert/packed_matrix.h"
#include "lib/convert/source_view.h"
#include "lib/engine/computed_source.h"
#include "lib/model/config.h"

namespace reshard {

class Unpacking {
 public:
  // Nothing if the source has no packed weights that can be unpacked, or `wanted` does not ask for it (--dtype with 2
  // bytes or more): then an adapter cannot be merged, which is a usage error. Errors name a weight that is incomplete
  // or contradicts itself, one that would stay packed next to others that do not (--keep-dtype), and a layout that
  // cannot be unpacked. Reads small tensors. `config` becomes that of the plain model.
  static Result<std::unique_ptr<Unpacking>> make(Reader& source, const Wanted& wanted, int threads, ConfigFile& config,
                                                 Notes& notes);

  // The plain model. The computed tensors lie in a file that does not exist, row-major, one after the other: a view of
  // them is of this file, whatever their rows and names become.
  const Catalog& catalog() const { return catalog_; }
  // The source's tensors that these of catalog() are read from.
  std::vector<std::size_t> operands(const std::vector<std::size_t>& tensors) const;
  // After the source has located these.
  void update(const Catalog& source);

  // Marks the tensors of a view that are computed (SourceView::computed).
  void note_computed(SourceView& view) const;
  // Makes the tensors of `computed` that lie in the file that does not exist what they are. `packed` has the source's
  // tensors. Refers to all.
  void set(TensorSource& packed, TensorSource& stored, ComputedSource& computed) const;
  Index worker_bytes() const { return worker_bytes_; }

 private:
  struct Weight {
    std::unique_ptr<PackedMatrix> matrix;
    DType dtype = DType::kFloat32;
    Index offset = 0;  // in the file
  };

  Unpacking() = default;
  Status add(Tensor like, std::unique_ptr<PackedMatrix> matrix, std::vector<std::size_t> parts, DType dtype);
  const Weight& at(Index offset) const;
  bool lies_here(const Tensor& tensor) const;  // some of it, in the file that does not exist
  Status fill(TensorSource& packed, TensorSource& stored, const Tensor& tensor, std::size_t number, const Box& box,
              MutableBytes out, MutableBytes scratch) const;
  Status fill_fragment(TensorSource& packed, const Tensor& tensor, const Fragment& fragment, const Box& part,
                       const Box& box, MutableBytes out, MutableBytes scratch) const;

  Catalog catalog_;
  std::uint32_t file_ = 0;                         // of catalog_, that does not exist
  std::vector<Weight> weights_;                    // by offset
  std::vector<std::vector<std::size_t>> sources_;  // of each tensor of catalog_
  std::vector<bool> is_computed_;                  // likewise
  Index worker_bytes_ = 0;
};

}  // namespace reshard
