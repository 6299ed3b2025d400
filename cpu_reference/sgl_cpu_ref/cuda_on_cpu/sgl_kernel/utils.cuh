// What the kernels take from SGLang's header of this name. Launches here never overlap.
#pragma once

namespace device {

template <bool kUsePDL>
inline void PDLWaitPrimary() {}

template <bool kUsePDL>
inline void PDLTriggerSecondary() {}

}  // namespace device
