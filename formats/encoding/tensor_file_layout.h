// A file of named tensors that is to be written, in either of the containers that model files come in: safetensors
// (safetensors_header.h draws one) or torch.save (torch_archive.h). Its size and the place of every tensor are fixed
// before there are any data; later it says what the bytes around them are.
//
//   [header][tensor 0][between][tensor 1] ... [trailer]      safetensors: a header, and nothing else
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"
#include "lib/layout/box.h"
#include "lib/layout/dtype.h"

namespace reshard {

enum class TensorFileKind { kSafetensors, kTorchSave };

struct FileTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  Index offset = 0;  // bytes, from the start of the file
  Index length = 0;  // bytes; row-major, always shape x dtype
};

class TensorFileLayout {
 public:
  // A file that holds `tensors` in this order; their offsets and lengths are filled in. Unsupported for an element type
  // or a name that the container cannot express, and for 2^63 bytes or more.
  static Result<TensorFileLayout> make(TensorFileKind kind, std::vector<FileTensor> tensors);

  const std::vector<FileTensor>& tensors() const { return tensors_; }
  Index size() const { return size_; }
  // Whether seal() asks for checksums.
  bool wants_crcs() const { return kind_ == TensorFileKind::kTorchSave; }

  using TensorCrc = std::function<std::uint32_t(const FileTensor& tensor)>;  // CRC-32 of its bytes
  using Emit = std::function<Status(Index offset, Bytes bytes)>;
  // Emits everything that is not tensor data, each byte once.
  Status seal(const TensorCrc& crc, const Emit& emit) const;

 private:
  Status lay_out_safetensors();
  Status lay_out_torch_save();

  TensorFileKind kind_ = TensorFileKind::kSafetensors;
  std::vector<FileTensor> tensors_;
  Index size_ = 0;
  std::string header_;  // of a safetensors file; a torch.save file's is made when its checksums are known
};

}  // namespace reshard
